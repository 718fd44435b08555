"""Casts of factors to 8 bits by kernels of their own, as torchao's linear layers make them.

A forward casts its inputs and its weight; a backward casts both again, and the gradient of the
outputs once for each of its two products.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from advisor.cost.load.unit_load import UnitLoad
from advisor.cost.load.work import ProductLoad
from profiles.model.work import ProductKind
from profiles.workload.eight_bits import takes_eight_bits


class Casts(NamedTuple):
    """Costs of a cast: kernels, and bytes moved and held for each element."""

    kernels: int
    moved_bytes: int
    held_bytes: int


# An operation after another (torchao 0.18, counted in `tests/engines/blocks/test_eight_bits.py`):
# absolute values of 2 bytes, their maximum, five kernels for the scale, and in 4 bytes a copy,
# scaled and clamped, two of which are there while the result is written.
EAGER = Casts(kernels=11, moved_bytes=33, held_bytes=9)
# As torch.compile writes it: the maximum in two kernels, a cast, and a transposed copy, which a
# product by 8 bits takes. By its bytes: a step of a GPT of 1.3 billion parameters takes 249 ms on
# an H200 by this, and took 275; in bf16, compiled too, 275 and 298 (`tests/validation/gpu.json`).
FUSED = Casts(kernels=4, moved_bytes=7, held_bytes=2)


def is_cast(product: ProductLoad) -> bool:
    """True for a linear layer's product that `precision=fp8` computes in 8 bits."""
    by_weight = product.kind is ProductKind.LINEAR and not product.is_wide
    return by_weight and takes_eight_bits(round(product.k), round(product.n))


def cast_elements(product: ProductLoad, *, forward: bool) -> float:
    """Elements that are cast for the product of a forward, or for the two of a backward."""
    factors = product.m * product.k + product.n * product.k
    return product.repeats * (factors if forward else factors + 2 * product.m * product.n)


def cast_count(product: ProductLoad, *, forward: bool) -> float:
    """Casts of a forward, or of a backward."""
    return product.repeats * (2 if forward else 4)


def with_casts(load: UnitLoad, casts: Casts) -> UnitLoad:
    """Add what is there while the largest factor of a forward and of a backward is cast.

    Compiled, a block whose layers are all cast keeps no inputs of theirs: what elementwise code
    makes of products and attention is made again, in the kernel that casts it. A GPT of 1.3 billion
    parameters held 44 GB on an H200, where it held 58 in bf16.
    """
    products = [product for product in load.work.products if is_cast(product)]
    if not products:
        return load
    if casts is FUSED and load.is_block and all(map(is_cast, _of_layers(load))):
        load = replace(load, activation_bytes=min(load.activation_bytes, load.selective_bytes))
    factors = max(max(each.m, each.n) * each.k for each in products)
    gradients = max(each.m * each.n for each in products)
    forward, backward = load.forward_transient_bytes, load.backward_transient_bytes
    return replace(
        load,
        forward_transient_bytes=forward + casts.held_bytes * factors,
        backward_transient_bytes=backward + casts.held_bytes * max(factors, gradients),
    )


def _of_layers(load: UnitLoad) -> list[ProductLoad]:
    kinds = (ProductKind.LINEAR, ProductKind.GROUPED)
    return [product for product in load.work.products if product.kind in kinds]
