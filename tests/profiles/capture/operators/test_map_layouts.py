"""Memory layouts of the maps of convolutions that are followed, beside those of real ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from profiles.capture.fakes.mode import FakeRunMode
from profiles.torch_compat.fakes import fake_tensors

LAST, FIRST = torch.channels_last, torch.contiguous_format


def strides(x: Tensor, weight: Tensor) -> list[tuple[int, ...]]:
    """Of the result, and of the gradients of both."""
    out = F.conv2d(x, weight, padding=1)
    gradients = torch.autograd.grad(out, (x, weight), torch.empty_like(out))
    return [tensor.stride() for tensor in (out, *gradients)]


@pytest.mark.parametrize("rows", [2, 8, 16, 32])
@pytest.mark.parametrize(
    ("of_maps", "of_weight"), [(LAST, LAST), (LAST, FIRST), (FIRST, LAST), (FIRST, FIRST)]
)
def test_maps_lie_as_those_of_a_real_convolution(
    rows: int, of_maps: torch.memory_format, of_weight: torch.memory_format
) -> None:
    x = torch.zeros(rows, 3, 16, 16).to(memory_format=of_maps).requires_grad_()
    weight = torch.zeros(8, 3, 3, 3).to(memory_format=of_weight).requires_grad_()
    with fake_tensors() as make, FakeRunMode():
        factors = (make(each, each.dtype).requires_grad_() for each in (x, weight))
        followed = strides(*factors)
    assert followed == strides(x, weight)
