"""Grouped products under autocast: 16 bits like other products, gradients in the weights' dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from profiles.model.work import GROUPED_ALIGNMENT
from profiles.torch_compat.grouped import ALIGNED, autocast_grouped_products


def product(rows: int, inner: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Operands in fp32, and where the rows of each of two experts end."""
    draw = torch.Generator().manual_seed(0)
    a = torch.randn(rows, inner, generator=draw).requires_grad_()
    b = torch.randn(2, inner, columns, generator=draw).requires_grad_()
    return a, b, torch.tensor([rows // 3, rows], dtype=torch.int32)


@pytest.fixture(autouse=True)
def registered() -> None:
    autocast_grouped_products()
    autocast_grouped_products()  # once more does nothing


def test_operands_are_cast_and_gradients_are_those_of_the_product_in_16_bits() -> None:
    a, b, ends = product(12, 16, 24)
    with torch.autocast("cpu", torch.bfloat16):
        result = torch._grouped_mm(a, b, ends)
    assert result.dtype == torch.bfloat16
    result.float().square().sum().backward()
    one, other = (t.detach().requires_grad_() for t in (a, b))
    parts = (one[:4].bfloat16() @ other[0].bfloat16(), one[4:].bfloat16() @ other[1].bfloat16())
    torch.cat(parts).float().square().sum().backward()
    for got, wanted in ((a.grad, one.grad), (b.grad, other.grad)):
        assert got is not None
        assert wanted is not None
        assert got.dtype == torch.float32
        assert (got - wanted).norm() < 1e-2 * wanted.norm()


def test_sizes_that_16_bit_kernels_refuse_stay_in_fp32() -> None:
    a, b, ends = product(12, 20, 24)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch._grouped_mm(a, b, ends).dtype == torch.float32


def test_closed_forms_know_the_same_sizes() -> None:
    assert GROUPED_ALIGNMENT == ALIGNED


def test_outside_of_autocast_nothing_changes() -> None:
    a, b, ends = product(12, 16, 24)
    assert torch._grouped_mm(a, b, ends).dtype == torch.float32
