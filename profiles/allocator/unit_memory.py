"""The tensors of a unit, as far as a profile tells them apart: what an allocator sees of it."""

from __future__ import annotations

from collections.abc import Sequence

from profiles.allocator.caching_allocator import SMALL_BYTES
from profiles.model.profile import UnitCost, UnitProfile

# A profile has sums of what is kept between two layers. It is taken to be in this many tensors at
# most: a layer's output, what is made of it, and the two large ones of attention without a fused
# kernel.
MOST_BETWEEN_LAYERS = 4


def parameter_tensors(unit: UnitProfile) -> tuple[float, ...]:
    """Bytes of each parameter; of those whose shapes the profile does not have, of all together."""
    known = [float(shape.nbytes) for shape in unit.shapes for _ in range(shape.count)]
    rest = unit.parameter_bytes - sum(known)
    return tuple(known) if rest <= 0 else (*known, rest)


def saved_sizes(cost: UnitCost, samples: float) -> tuple[float, ...]:
    """Bytes of each tensor kept for the backward, in the order of the unit's layers."""
    parts = [
        (layer.own.activation_bytes.at(samples), layer.after.activation_bytes.at(samples))
        for layer in cost.layers
    ]
    before = cost.activation_bytes.at(samples) - sum(own + after for own, after in parts)
    tensors = _equal(before, cost.layers[0].input_bytes.at(samples) if cost.layers else before)
    for layer, (own, after) in zip(cost.layers, parts, strict=True):
        tensors += _equal(own, layer.input_bytes.at(samples))
        tensors += _equal(after, layer.output_bytes.at(samples))
    return tuple(tensors)


def scaled(tensors: Sequence[float], total: float) -> tuple[float, ...]:
    """The same tensors where they are `total` bytes on a rank: a share of each."""
    whole = sum(tensors)
    if not whole:
        return (total,) if total >= 1 else ()
    return tuple(nbytes * total / whole for nbytes in tensors)


def _equal(total: float, size: float) -> list[float]:
    """Tensors of about `size`, `total` together."""
    if total < 1:
        return []
    count = round(total / max(size, SMALL_BYTES))
    count = max(1, min(MOST_BETWEEN_LAYERS, count))
    return [total / count] * count
