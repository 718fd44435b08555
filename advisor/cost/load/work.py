"""Products and attention of a unit on one rank, after tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from advisor.cost.load.tensor import Styled, cut_share, token_share
from engines.tensor.styles import LOCAL, Kind, cutting
from profiles.model.layers import LayerCost, LayerKind, Stretch
from profiles.model.profile import UnitCost
from profiles.model.work import AttentionKernel, Product, ProductKind, attention_cost

# Bytes per operand element if a profile does not record them.
ELEMENT_BYTES = 2.0


class ProductLoad(NamedTuple):
    """`repeats` products of (m, k) by (k, n); FLOP and bytes of all of them.

    `is_recomputed`: by a recompute that stops early, see `LayerCost`. `is_convolution`: the product
    is an implicit one. `is_wide`: in fp32 whatever the plan's precision.
    """

    kind: ProductKind
    m: float
    n: float
    k: float
    repeats: float
    forward_flop: float
    backward_flop: float
    forward_bytes: float
    backward_bytes: float
    fewest: float = 1.0
    is_recomputed: bool = True
    is_convolution: bool = False
    is_wide: bool = False


class AttentionLoad(NamedTuple):
    """FLOP of attention by one kernel, and cycles of a core beside them; `width` of a head.

    `queries` and `keys` are tokens; `scores` those of all heads and samples that are computed.
    Bytes are zero of kernels that write scores: what they move is that of operations in sequence.
    """

    kernel: AttentionKernel
    width: int
    forward_flop: float
    backward_flop: float
    forward_cycles: float = 0.0
    backward_cycles: float = 0.0
    queries: int = 0
    keys: int = 0
    is_causal: bool = False
    dropout: bool = False
    scores: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class UnitWork:
    """Products and attention of a unit; the rest of its FLOP is of unrecorded products."""

    products: tuple[ProductLoad, ...] = ()
    attention: tuple[AttentionLoad, ...] = ()


NO_WORK = UnitWork()


def unit_work(cost: UnitCost, styled: Styled, *, tp: int, samples: float) -> UnitWork:
    """Work of `cost` at a microbatch of `samples`, on one of `tp` ranks."""
    rest = token_share(styled, tp)
    products: list[ProductLoad] = []
    attention: list[AttentionLoad] = []

    def inside(part: Stretch | UnitCost, share: float) -> None:
        products.extend(_noted(product, share, samples) for product in part.products)
        attention.extend(_attention(part, share, samples))

    inside(cost, rest)
    for layer, place in zip(cost.layers, styled[1:], strict=True):
        style = cutting(place.styles)
        if style is None:
            own = after = rest
        else:
            share = cut_share(layer, style, tp)
            own = 1 / style.packs if style.kind is Kind.HEADS else share
            is_local = style.kind in (*LOCAL, Kind.VOCAB)
            is_rows = layer.kind is LayerKind.EMBEDDING and style.kind is not Kind.COLUMN
            after = share if is_local and not is_rows else rest
        product = _own(layer, None if style is None else style.kind, own, samples)
        if product is not None:
            products.append(product)
        inside(layer.after, after)
    return UnitWork(tuple(products), tuple(attention))


def over_expert_ranks(work: UnitWork, ep: int) -> UnitWork:
    """A rank has its part of the experts, and the tokens of all `ep` ranks for them.

    It reads and writes as many rows as without `ep`, but only its part of the weights; the backward
    reads them and writes their gradients.
    """

    def part(each: ProductLoad) -> ProductLoad:
        if each.kind is not ProductKind.GROUPED:
            return each
        spared = ELEMENT_BYTES * each.n * each.k * each.repeats * (1 - 1 / ep)
        return each._replace(
            m=each.m * ep,
            repeats=each.repeats / ep,
            forward_bytes=max(0.0, each.forward_bytes - spared),
            backward_bytes=max(0.0, each.backward_bytes - 2 * spared),
        )

    return UnitWork(tuple(map(part, work.products)), work.attention)


def _own(layer: LayerCost, kind: Kind | None, share: float, samples: float) -> ProductLoad | None:
    """The layer's own product; of a convolution the implicit one, with a row for each position."""
    own = layer.own
    flop = own.forward_flop.at(samples)
    if not flop:
        return None
    n, k = float(layer.outputs), _depth(layer)
    m = flop / (2 * n * k)
    full = (layer.output_bytes if kind is Kind.ROW else layer.input_bytes).at(samples)
    if kind is None:
        m *= share
        full = 0.0
    elif kind is Kind.ROW:
        k *= share
    else:
        n *= share
    moved, back = own.forward_moved_bytes.at(samples), own.backward_moved_bytes.at(samples)
    if layer.kind is not LayerKind.CONVOLUTION:
        # The layer's call also casts what it is given, and sums its bias's gradient: kernels beside
        # the product, which hides none of their bytes.
        rows = flop / (2 * n * k)
        element = layer.output_bytes.at(samples) / (rows * n) or ELEMENT_BYTES
        alone = element * (rows * (n + k) + layer.calls * n * k)
    else:
        # Maps that are turned around it, too.
        alone = (layer.input_bytes + layer.output_bytes).at(samples) + layer.weight_bytes
    moved, back = min(moved, alone), min(back, (1 + layer.needs_input_gradient) * alone)
    return ProductLoad(
        kind=ProductKind.LINEAR,
        m=m / layer.calls,
        n=n,
        k=k,
        repeats=float(layer.calls),
        forward_flop=share * flop,
        backward_flop=share * own.backward_flop.at(samples),
        forward_bytes=share * moved + (1 - share) * min(full, moved),
        backward_bytes=share * back + (1 - share) * min(2 * full, back),
        is_recomputed=layer.is_recomputed,
        is_convolution=layer.kind is LayerKind.CONVOLUTION,
    )


def _depth(layer: LayerCost) -> float:
    """Elements that each output sums over."""
    if layer.kind is LayerKind.CONVOLUTION and layer.weight_bytes:
        # The weight is (outputs, inputs / groups, *kernel) in fp32 or half of that.
        return max(1.0, layer.weight_bytes / 4 / layer.outputs)
    return float(layer.inputs)


def _noted(product: Product, share: float, samples: float) -> ProductLoad:
    m, n, k = product.m.at(samples) * share, float(product.n), float(product.k)
    flop = 2 * m * n * k * product.count
    moved = ELEMENT_BYTES * product.count * (m * k + k * n + m * n)
    there = moved if product.forward_bytes is None else share * product.forward_bytes.at(samples)
    back = (
        2 * moved if product.backward_bytes is None else share * product.backward_bytes.at(samples)
    )
    return ProductLoad(
        product.kind, m, n, k, float(product.count), flop,
        (1 + product.needs_input_gradient) * flop, there, back, product.fewest,
        is_convolution=product.kind is ProductKind.CONVOLUTION, is_wide=product.is_wide,
    )  # fmt: skip


def _attention(part: Stretch | UnitCost, share: float, samples: float) -> Iterator[AttentionLoad]:
    for call in part.attention:
        cost = attention_cost(call, call.kernel)
        rows = share * samples
        is_fused = not call.kernel.keeps_scores and call.kernel is not AttentionKernel.CPU
        hidden = rows * is_fused
        yield AttentionLoad(
            call.kernel,
            call.width,
            rows * cost.forward_flop,
            rows * cost.backward_flop,
            rows * cost.forward_cycles,
            rows * cost.backward_cycles,
            queries=call.queries,
            keys=call.keys,
            is_causal=call.is_causal,
            dropout=call.dropout,
            scores=cost.forward_flop / (2.0 * (call.width + call.value_width)) * rows,
            forward_bytes=hidden * cost.forward_moved_bytes,
            backward_bytes=hidden * cost.backward_moved_bytes,
        )


def convention(cost: UnitCost) -> float:
    """FLOP per sample that papers count for attention, less those that its kernels execute."""
    missing = 0.0
    for call in cost.calls():
        done = attention_cost(call, call.kernel)
        product = 2.0 * call.pairs * (call.width + call.value_width)
        missing += 3 * product - done.forward_flop - done.backward_flop
    return missing
