"""Tensor parallelism: a unit's load on one rank, and its collectives, those of `engines.tensor`.

They are Megatron's (arXiv:1909.08053, and arXiv:2205.05198 by tokens): a column-wise layer sums the
gradients of its input, a row-wise one its outputs, one with gathered output also gathers those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from advisor.cost.load.head_bias import (
    BiasExchange,
    bias_exchanges,
    handed_between,
    is_attention_recomputed,
    split_heads,
    tables_by_head,
)
from advisor.cost.load.path_pattern import PathPattern
from engines.tensor.styles import LOCAL, Kind, Style, cutting, without_numbers
from engines.tensor.token_rules import SPLIT
from profiles.machine.cluster import Collective
from profiles.model.layers import LayerCost, LayerKind
from profiles.model.profile import ModelProfile, Numerics, UnitCost, UnitProfile
from profiles.workload.optimizer_states import FP32_BYTES
from profiles.workload.stack import TORCH, Stack


@dataclass(frozen=True, slots=True)
class TensorExchange:
    """A collective of a unit over the tp axis, once per microbatch.

    Attributes:
        in_forward: in the forward, else in the backward.
        is_repeated: recompute runs it again before the backward.
        axis: of the mesh: "tp", "cp" or "ep".
        copies: of each token in the payload, sent to experts that may be on one node.
    """

    kind: Collective
    purpose: str
    payload_bytes: float
    in_forward: bool
    is_repeated: bool = False
    axis: str = "tp"
    copies: float = 1.0


@dataclass(frozen=True, slots=True)
class SplitUnit:
    """Load of a unit on one rank, as shares of the whole unit or in bytes."""

    parameter_bytes: float
    gradient_bytes: float
    partial_gradient_bytes: float
    partial_tensors: int
    forward_flop: float
    backward_flop: float
    forward_moved_bytes: float
    backward_moved_bytes: float
    forward_cycles: float
    backward_cycles: float
    activation_bytes: float
    selective_bytes: float
    input_bytes: float
    output_bytes: float
    forward_transient_bytes: float
    backward_transient_bytes: float
    exchanges: tuple[TensorExchange, ...]


class AppliedStyles(NamedTuple):
    """Styles of a module.

    Attributes:
        joined_at: the path of the module that gathers its input tokens (its own, or an enclosing
            one's).
        tokens: of a sample, where a unit is split by them and the profile says how many.
        biases: of a unit, by head, that it hands to others or takes from them.
    """

    styles: tuple[Style, ...]
    joined_at: str | None = None
    tokens: int = 0
    biases: tuple[BiasExchange, ...] = ()


Styled = tuple[AppliedStyles, ...]
"""Of a unit itself, then of each of its layers."""
UNSTYLED: Styled = (AppliedStyles(()),)
"""Of code that no style is for."""


class Styles:
    """Lookup of `Plan.tensor_styles` by path."""

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        styles = [(PathPattern.of(pattern), Style.parse(text)) for pattern, text in pairs]
        self._of_length: dict[int, list[tuple[PathPattern, Style]]] = {}
        # Others fit blocks of one list whatever their numbers.
        self._numbered = [pattern for pattern, _ in styles if pattern.is_numbered]
        self._known: dict[tuple[str, int], tuple[Sequence[LayerCost], Styled]] = {}
        for pattern, style in styles:
            self._of_length.setdefault(pattern.length, []).append((pattern, style))

    def of_unit(self, unit: UnitProfile, layers: Sequence[LayerCost]) -> Styled:
        """Styles of `unit` and of each of its `layers`."""
        parts = unit.name.split(".")
        is_numbered = any(pattern.may_fit(parts) for pattern in self._numbered)
        name = unit.name if is_numbered else without_numbers(unit.name)
        key = name, id(layers)  # equal blocks share one layers object
        if key not in self._known:
            inside = [self._of_layer(unit.name, layer.path) for layer in layers]
            self._known[key] = layers, (AppliedStyles(self._at(unit.name)), *inside)
        return self._known[key][1]

    def _at(self, path: str) -> tuple[Style, ...]:
        parts = path.split(".")
        alike = self._of_length.get(len(parts), ())
        return tuple(style for pattern, style in alike if pattern.fits(parts))

    def _of_layer(self, unit: str, path: str) -> AppliedStyles:
        styles = self._at(_joined(unit, path))
        parts = path.split(".")
        around = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)] if path else []
        joined = [p for p in around if _JOINED in self._at(_joined(unit, p))]
        return AppliedStyles(styles, joined[-1] if joined else None)


_JOINED = Style(kind=Kind.JOINED)
_ENTRY, _EXIT = Style(kind=Kind.ENTRY), Style(kind=Kind.EXIT)


def _joined(unit: str, path: str) -> str:
    return f"{unit}.{path}" if unit and path else unit or path


def with_biases(
    model: ModelProfile, units: Iterable[Styled], *, numerics: Numerics
) -> list[Styled]:
    """Styles of all units, with the biases by head that split attention exchanges."""
    handed = handed_between(model)
    known: dict[tuple[Styled, tuple[BiasExchange, ...]], Styled] = {}

    def with_its(unit: UnitProfile, styled: Styled) -> Styled:
        if unit.name not in handed:
            return styled
        styles = [place.styles for place in styled[1:]]
        biases = bias_exchanges(handed[unit.name], unit.cost(numerics).layers, styles)
        made = (styled[0]._replace(biases=biases), *styled[1:])
        return known.setdefault((styled, biases), made) if biases else styled

    return list(map(with_its, model.units, units))


def cut_share(layer: LayerCost, style: Style, tp: int) -> float:
    """Share of a layer's weight on the first rank, the largest, as `torch.chunk` splits."""
    length = layer.inputs if style.kind is Kind.ROW else layer.outputs
    if layer.kind is LayerKind.EMBEDDING and style.kind is not Kind.COLUMN:
        length = layer.inputs
    each = length // style.packs
    return ceil(each / tp) / each if each else 1.0


def is_split(styled: Styled) -> bool:
    """Return True if the unit has any style."""
    return any(place.styles for place in styled)


def token_share(styled: Styled, tp: int) -> float:
    """Share of a unit's tokens that a rank has outside of split layers; padded to be equal."""
    if SPLIT not in styled[0].styles:
        return 1.0
    tokens = styled[0].tokens
    return ceil(tokens / tp) / tokens if tokens else 1 / tp


def hands_on(styled: Styled) -> bool:
    """Return True if the unit returns its rank's share of the tokens."""
    return SPLIT in styled[0].styles and _EXIT not in styled[0].styles


def cut(
    cost: UnitCost,
    unit: UnitProfile,
    styled: Styled,
    *,
    tp: int,
    samples: float,
    stack: Stack = TORCH,
) -> SplitUnit:
    """Split `unit` over `tp` ranks at a microbatch of `samples`, as `stack` does."""
    by_tokens = SPLIT in styled[0].styles
    around = token_share(styled, tp)
    sums = _Sums(cost, samples, around)
    heads = split_heads(cost.layers, [place.styles for place in styled[1:]])
    parameter_bytes, gradient_bytes = float(unit.parameter_bytes), float(unit.gradient_bytes)
    # Everything outside is split by tokens, or else between a column-wise layer and its row.
    partial = gradient_bytes if by_tokens else 0.0
    tensors = sum(shape.count for shape in unit.shapes) if by_tokens else 0
    for layer, place in zip(cost.layers, styled[1:], strict=True):
        style = cutting(place.styles)
        weights, biases = layer.weight_gradient_bytes, layer.bias_gradient_bytes
        if style is None:
            sums.add(layer, own=around, after=around, saved=around)
            continue
        share = cut_share(layer, style, tp)
        row = style.kind is Kind.ROW
        if style.kind is Kind.HEADS:  # one of the heads, for the rank's share of the queries
            own = 1 / style.packs
            sums.add(
                layer, own=own, after=share, saved=1.0, whole_bytes=layer.input_bytes.at(samples)
            )
            if not by_tokens:
                parts = weights, biases, *layer.after.parameter_gradient_bytes
                partial += sum(parts)
                tensors += sum(part > 0 for part in parts)
            continue
        parameter_bytes -= layer.weight_bytes * (1 - share)
        gradient_bytes -= weights * (1 - share)
        if by_tokens:
            partial -= weights
            tensors -= weights > 0
        if not row and layer.kind is not LayerKind.EMBEDDING:
            parameter_bytes -= layer.bias_bytes * (1 - share)
            gradient_bytes -= biases * (1 - share)
            if by_tokens:
                partial -= biases
                tensors -= biases > 0
        if layer.kind is LayerKind.EMBEDDING:
            is_local = style.kind is Kind.COLUMN
            own, after = (share, share) if is_local else (1.0, around)
            sums.add(layer, own=own, after=after, saved=1.0)
        elif row:
            sums.add(
                layer,
                own=share,
                after=around,
                saved=share,
                whole_bytes=layer.output_bytes.at(samples),
            )
        else:
            is_local = style.kind in (Kind.COLUMN, Kind.VOCAB)
            after = share if is_local else around
            if is_local:
                used, tables = layer.after.parameter_gradient_bytes, tables_by_head(layer, heads)
                parameter_bytes -= sum(tables) * (1 - 1 / tp)
                gradient_bytes -= sum(tables) * (1 - 1 / tp)
                partial += -sum(tables) if by_tokens else sum(used) - sum(tables)
                tensors += -len(tables) if by_tokens else len(used) - len(tables)
            sums.add(
                layer, own=share, after=after, saved=1.0, whole_bytes=layer.input_bytes.at(samples)
            )
            if not is_local:  # recompute gathers again what it has a share of
                retained = layer.after.selective_activation_bytes.at(samples)
                retained = min(layer.output_bytes.at(samples), retained)
                sums.of["selective_activation_bytes"] -= max(0.0, after - share) * retained
    padded = around * tp if by_tokens else None
    exchanges = tuple(_exchanges(cost, styled, samples=samples, padded=padded, stack=stack))
    saved = sums.of["activation_bytes"]
    if by_tokens and stack.keeps_gathered:
        # Gathered tokens are saved unsharded for the weight gradient, once per gather, instead of
        # their producer's share.
        joined = [layer for layer in _joining(cost, styled) if _keeps(layer, samples)]
        once = {layer.same_input: layer for layer in joined}
        saved += sum(layer.input_bytes.at(samples) for layer in joined)
        saved -= around * sum(layer.input_bytes.at(samples) for layer in once.values())
    whole_saved = cost.activation_bytes.at(samples)
    moved = cost.backward_moved_bytes.at(samples)
    in_work = sums.of["backward_moved_bytes"] / moved if moved else 1.0
    output = cost.output_bytes.at(samples) * _output_share(cost, styled, tp)
    forward = cost.forward_transient_bytes.at(samples)
    saved_share = saved / whole_saved if whole_saved else 1.0
    inputs = cost.input_bytes.at(samples)
    if by_tokens:  # blocks take their share of the tokens, and hand it on
        inputs = max(inputs - (1 - around) * output, around * inputs)
        output *= 1.0 if _EXIT in styled[0].styles else around
    return SplitUnit(
        parameter_bytes=parameter_bytes,
        gradient_bytes=gradient_bytes,
        partial_gradient_bytes=partial,
        partial_tensors=tensors,
        **{name: sums.of[name] for name in (*_WORK, *_MOVED)},
        activation_bytes=saved,
        selective_bytes=sums.of["selective_activation_bytes"],
        input_bytes=inputs,
        output_bytes=output,
        # The peak of the forward is near its end, when nearly all activations are saved.
        forward_transient_bytes=max(
            forward - (whole_saved - saved), forward * min(1.0, saved_share)
        )
        + _room(exchanges, in_forward=True),
        backward_transient_bytes=cost.backward_transient_bytes.at(samples) * min(1.0, in_work)
        + _room(exchanges, in_forward=False),
        exchanges=exchanges,
    )


def _output_share(cost: UnitCost, styled: Styled, tp: int) -> float:
    """Share of the unit's output on a rank: split logits are a part of the vocabulary."""
    for layer, place in zip(cost.layers, styled[1:], strict=True):
        style = cutting(place.styles)
        if layer.reaches_output and layer.kind is not LayerKind.EMBEDDING and style is not None:
            return cut_share(layer, style, tp) if style.kind in (Kind.COLUMN, Kind.VOCAB) else 1.0
    return 1.0


# Amounts of a stretch that a rank has a share of.
_WORK = ("forward_flop", "backward_flop", "forward_cycles", "backward_cycles")
_MOVED = {"forward_moved_bytes": 1, "backward_moved_bytes": 2}
"""And how often each direction reads or writes what a split layer has whole."""
_SAVED = ("activation_bytes", "selective_activation_bytes")


class _Sums:
    """Sums over the stretches of a unit on a rank, by amount; the rest of the unit has share
    `around`."""

    def __init__(self, cost: UnitCost, samples: float, around: float) -> None:
        self._samples = samples
        inside = [stretch for layer in cost.layers for stretch in (layer.own, layer.after)]
        self.of = {
            name: float(
                around
                * (
                    getattr(cost, name).at(samples)
                    - sum(getattr(stretch, name).at(samples) for stretch in inside)
                )
            )
            for name in (*_WORK, *_MOVED, *_SAVED)
        }

    def add(
        self, layer: LayerCost, *, own: float, after: float, saved: float, whole_bytes: float = 0.0
    ) -> None:
        """Add a layer at shares `own` and `after`; its own activations at `saved`. `whole_bytes`
        are accessed unsharded: once in the forward, twice in the backward."""
        for name in self.of:
            amount = getattr(layer.own, name).at(self._samples)
            self.of[name] += (saved if name in _SAVED else own) * amount
            if name in _MOVED:
                self.of[name] += (1 - own) * min(_MOVED[name] * whole_bytes, amount)
            self.of[name] += after * getattr(layer.after, name).at(self._samples)


def _keeps(layer: LayerCost, samples: float) -> bool:
    """Return True if the layer saves its input itself, not a copy."""
    return layer.own.activation_bytes.at(samples) == 0.0


def _joining(cost: UnitCost, styled: Styled) -> Iterator[LayerCost]:
    """First layers that read gathered tokens, one per gather: of those in the module that gathers
    them, or of those that take the same tensor."""
    seen: set[str | int] = set()
    for layer, place in zip(cost.layers, styled[1:], strict=True):
        style = cutting(place.styles)
        if place.joined_at is None or style is None or style.kind is Kind.ROW:
            continue
        key = layer.same_input if place.joined_at == layer.path else place.joined_at
        if key not in seen:
            seen.add(key)
            yield layer


def _exchanges(
    cost: UnitCost, styled: Styled, *, samples: float, padded: float | None, stack: Stack
) -> Iterator[TensorExchange]:
    """Collectives in the order of `engines.tensor.split`.

    Args:
        padded: tokens of all ranks' shares over those of the sequence; None if whole.
    """
    by_tokens = padded is not None
    copied = None  # the tensor whose gradient the last layer of that kind sums
    for layer, place in zip(cost.layers, styled[1:], strict=True):
        style = cutting(place.styles)
        if style is None:
            continue
        given, made = layer.input_bytes.at(samples), layer.output_bytes.at(samples)
        again = stack.recomputes_whole or layer.is_recomputed
        if layer.kind is LayerKind.EMBEDDING:
            if style.kind is not Kind.COLUMN:
                yield TensorExchange(Collective.ALL_REDUCE, "embeddings", made, True, again)
            continue
        if style.kind is Kind.ROW:
            if padded is not None:
                made *= padded
                yield TensorExchange(
                    Collective.REDUCE_SCATTER, "outputs by tokens", made, True, again
                )
                yield TensorExchange(Collective.ALL_GATHER, "gradients by tokens", made, False)
            else:
                yield TensorExchange(Collective.ALL_REDUCE, "outputs", made, True, again)
            continue
        if not (by_tokens and style.kind in LOCAL):
            if layer.same_input != copied and layer.needs_input_gradient:
                yield TensorExchange(Collective.ALL_REDUCE, "gradients of inputs", given, False)
            copied = layer.same_input
        if style.kind is Kind.GATHER:
            yield TensorExchange(Collective.ALL_GATHER, "gathered outputs", made, True, again)
    again = stack.recomputes_whole or is_attention_recomputed(cost.layers)
    for nbytes, forward in styled[0].biases:
        purpose = "biases by head" if forward else "gradients of biases by head"
        payload = nbytes.at(samples)
        yield TensorExchange(Collective.ALL_GATHER, purpose, payload, forward, forward and again)
    if padded is None:
        return
    for layer in _joining(cost, styled):
        given = layer.input_bytes.at(samples) * padded
        yield TensorExchange(Collective.ALL_GATHER, "tokens", given, True, True)
        if not stack.keeps_gathered:
            yield TensorExchange(Collective.ALL_GATHER, "tokens again", given, False)
        if layer.needs_input_gradient:
            yield TensorExchange(Collective.REDUCE_SCATTER, "gradients by tokens", given, False)
    # At the ends of a chain of blocks; recompute is inside.
    whole, ends = cost.output_bytes.at(samples) * padded, styled[0].styles
    if _EXIT in ends:
        yield TensorExchange(Collective.ALL_GATHER, "tokens", whole, True)
    if _ENTRY in ends:
        yield TensorExchange(Collective.ALL_GATHER, "gradients by tokens", whole, False)


def split_loss(rows: float) -> tuple[TensorExchange, ...]:
    """Cross-entropy of split logits: for every row its highest logit, the sum of its exponentials
    and the logit of its class (`engines.tensor.logits`), in fp32."""
    purposes = ("highest logits", "sums of exponentials", "logits of classes")
    return tuple(
        TensorExchange(Collective.ALL_REDUCE, purpose, rows * FP32_BYTES, True)
        for purpose in purposes
    )


def _room(exchanges: Sequence[TensorExchange], *, in_forward: bool) -> float:
    """Temporary bytes of the largest exchange: a sum clones shared tensors; gathers and scatters
    copy."""
    rooms = [
        (1 if each.kind is Collective.ALL_REDUCE else 2) * each.payload_bytes
        for each in exchanges
        if each.in_forward is in_forward and not (in_forward and each.kind is Collective.ALL_REDUCE)
    ]
    return max(rooms, default=0.0)
