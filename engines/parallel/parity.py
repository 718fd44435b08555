"""Differences of a plan from one process: relative, by name, with the tolerance of their dtype.

A loss differs relative to itself. A tensor's largest difference is relative to the largest element
wanted of it, but of at least `ZERO` of the largest of all tensors: a gradient that is zero but for
rounding has no size of its own (the bias of the keys of an attention, which softmax does not see; a
bias before a norm).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ZERO = 1e-3


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest relative difference that rounding explains, and why it is that."""

    value: float
    because: str


TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(
        1e-11, "fp64 rounds by 1e-16; sums in another order, over layers, lose some digits"
    ),
    torch.float32: Tolerance(
        1e-4, "fp32 rounds by 6e-8; ranks add in another order, and layers pass it on"
    ),
    torch.bfloat16: Tolerance(
        8e-2, "bf16 rounds by 0.4%, in every layer, forward and backward; sums round otherwise"
    ),
    torch.float16: Tolerance(
        1e-2, "fp16 rounds by 0.05%, in every layer, forward and backward; sums round otherwise"
    ),
    torch.float8_e4m3fn: Tolerance(
        0.3,
        "fp8 rounds by 6%, gradients by 12%, in every linear layer; ranks scale their own parts",
    ),
}
"""By the dtype that a forward computes in: 20 roundings in a row for the narrow ones; for fp32 ten
times what 30 architectures under 15 plans reach with the same microbatches."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest of several.

    Attributes:
        value: relative; nan where one side is not finite, inf where one has nothing to compare.
        name: of the tensor that has it; empty for a single number.
    """

    value: float
    name: str = ""

    def is_within(self, tolerance: Tolerance) -> bool:
        return self.value <= tolerance.value  # False for nan


def relative(got: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest value wanted."""
    scale = wanted.abs().max().item() or 1.0
    return (got - wanted).abs().max().item() / scale


def relative_errors(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    """The difference of each tensor of `wanted`, as the head of this file says."""
    sizes = {name: _largest(tensor) for name, tensor in wanted.items()}
    least = ZERO * max(sizes.values(), default=0.0) or 1.0
    return {
        name: _largest(got[name].to(tensor) - tensor) / max(sizes[name], least)
        for name, tensor in wanted.items()
    }


def largest_difference(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Difference:
    """The worst of the tensors; one that is on one side only is infinitely different."""
    for name in sorted(got.keys() ^ wanted.keys()):
        return Difference(float("inf"), name)
    errors = relative_errors(got, wanted)
    if not errors:
        return Difference(0.0)
    worst = max(errors, key=lambda name: _nan_first(errors[name]))
    return Difference(errors[worst], worst)


def _largest(tensor: Tensor) -> float:
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0


def _nan_first(value: float) -> float:
    return value if value == value else float("inf")
