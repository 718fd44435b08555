"""Biases of attention scores by head under tensor parallelism, as `engines.tensor.head_bias` has
them: what units hand to each other by head, and parameters that are cut by heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engines.tensor.rules import SCORES_RANK, is_by_head
from engines.tensor.styles import LOCAL, Style, cutting
from profiles.model.affine import Affine
from profiles.model.flow import Value
from profiles.model.layers import INPUT, LayerCost
from profiles.model.profile import ModelProfile


class BiasExchange(NamedTuple):
    """An all-gather of a bias by head.

    Attributes:
        in_forward: of what a unit returns for later ones; else of the gradient of what it takes.
    """

    nbytes: Affine
    in_forward: bool


Handed = dict[str, list[tuple[Value, bool]]]
"""By unit, values with the shape of scores; True: it makes them, False: it takes them."""


def handed_between(model: ModelProfile) -> Handed:
    """Values with the shape of scores that units take and make: T5's bias goes from block to
    block."""
    handed: Handed = {}
    calls, made = model.flow.calls, set()
    for edge in model.flow.edges:
        value = model.flow.value(edge)
        if len(value.shape) != SCORES_RANK:
            continue
        if (edge.source, edge.value) not in made:
            made.add((edge.source, edge.value))
            handed.setdefault(calls[edge.source].unit, []).append((value, True))
        if value.needs_gradient:
            handed.setdefault(calls[edge.target].unit, []).append((value, False))
    return handed


def bias_exchanges(
    handed: Sequence[tuple[Value, bool]],
    layers: Sequence[LayerCost],
    styles: Sequence[Sequence[Style]],
) -> tuple[BiasExchange, ...]:
    """The exchanges of a unit whose attention is split by heads; `styles` are those of `layers`."""
    heads = split_heads(layers, styles)
    return tuple(
        BiasExchange(value.bytes, in_forward)
        for value, in_forward in handed
        if value.shape[1] == heads > 1
    )


def split_heads(layers: Sequence[LayerCost], styles: Sequence[Sequence[Style]]) -> int:
    """The heads over which attention is split; 1 where it is not."""
    split = (
        layer.heads
        for layer, each in zip(layers, styles, strict=True)
        if (style := cutting(each)) is not None and style.kind in LOCAL
    )
    return max(split, default=1)


def tables_by_head(layer: LayerCost, heads: int) -> list[int]:
    """Gradient bytes of the parameters between this layer and the next that are cut by heads. Those
    that are used before the first layer of a unit, a few KiB, count as whole."""
    element = layer.weight_gradient_bytes / (layer.inputs * layer.outputs) or 1.0
    piece = layer.pieces[0] if layer.pieces else layer.outputs
    used = layer.after.parameter_gradient_bytes
    return [nbytes for nbytes in used if is_by_head(nbytes / element, heads, piece)]


def is_attention_recomputed(layers: Sequence[LayerCost]) -> bool:
    """Return True if recompute goes on behind the layers that take what heads attend to: there a
    bias is gathered for later blocks."""
    rows = (
        layer
        for layer in layers
        if any(source != INPUT and layers[source].heads > 1 for source in layer.sources)
    )
    return all(layer.is_recomputed for layer in rows)
