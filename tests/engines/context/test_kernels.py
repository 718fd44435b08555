"""Attention with its log-sum-exp, forward and backward: the formula, by kernel or without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from profiles.torch_compat import attention as attention_kernels
from profiles.torch_compat.attention import attend, attend_backward
from tests.engines.context.formula import written_out


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("width", [8, 6], ids=["kernel", "plain"])
def test_attention_with_its_log_sum_exp_is_the_formula(width: int, is_causal: bool) -> None:
    q, k = (torch.randn(2, 3, 7, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    v = torch.randn(2, 3, 7, width, dtype=torch.float64, requires_grad=True)
    wanted = written_out(q, k, v, is_causal=is_causal, scale=0.3)
    gradient = torch.randn_like(wanted)
    wanted.backward(gradient)
    given = [t.detach() for t in (q, k, v)]
    out, lse = attend(*given, is_causal=is_causal, scale=0.3)
    assert torch.allclose(out, wanted)
    if not is_causal:
        assert torch.allclose(lse, (given[0] @ given[1].transpose(2, 3) * 0.3).logsumexp(3))
    gradients = attend_backward(gradient, *given, out, lse, is_causal=is_causal, scale=0.3)
    for got, leaf in zip(gradients, (q, k, v), strict=True):
        assert leaf.grad is not None
        assert torch.allclose(got, leaf.grad)


def test_the_flash_kernel_of_cuda_is_given_a_dense_log_sum_exp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It reads the numbers from their first address on, whatever the strides; of the later half of
    the queries these are a view."""
    given: list[Tensor] = []
    name = "_scaled_dot_product_flash_attention_backward"
    monkeypatch.setattr(attention_kernels, "_kernel", lambda *_: "flash")
    monkeypatch.setattr(torch.ops.aten, name, lambda *args, **_: given.extend(args[:6]))
    q, k, v, out, gradient = (torch.randn(2, 3, 8, 4) for _ in range(5))
    lse, rows = torch.randn(2, 3, 8), slice(4, None)
    later = (t[:, :, rows] for t in (gradient, q, k, v, out, lse))
    attend_backward(*later, is_causal=False, scale=0.5)
    assert given[5].is_contiguous()
    assert torch.equal(given[5], lse[:, :, rows])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_the_kernel_of_cuda_takes_the_later_half_of_the_queries() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(2, 3, 64, 32, device="cuda", dtype=torch.bfloat16, generator=generator)
        for _ in range(3)
    )
    rows = slice(32, None)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    wanted = written_out(*leaves, is_causal=False, scale=0.2)[:, :, rows]
    gradient = torch.randn_like(wanted)
    wanted.backward(gradient)
    out, lse = attend(q, k, v, is_causal=False, scale=0.2)
    later, its_out, its_lse = (t[:, :, rows] for t in (q, out, lse))
    gradients = attend_backward(
        gradient.bfloat16(), later, k, v, its_out, its_lse, is_causal=False, scale=0.2
    )
    for got, leaf, own in zip(gradients, leaves, (rows, slice(None), slice(None)), strict=True):
        assert leaf.grad is not None
        assert (got - leaf.grad[:, :, own]).abs().max() < 5e-2 * leaf.grad.abs().max()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("is_causal", [True, False])
def test_the_kernel_of_cuda_is_the_formula_too(is_causal: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(2, 3, 64, 32, device="cuda", dtype=torch.bfloat16, generator=generator)
        for _ in range(3)
    )
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    wanted = written_out(*leaves, is_causal=is_causal, scale=0.2)
    gradient = torch.ones_like(q)
    wanted.backward(gradient.double())
    out, lse = attend(q, k, v, is_causal=is_causal, scale=0.2)
    assert (out - wanted).abs().max() < 2e-2
    gradients = attend_backward(gradient, q, k, v, out, lse, is_causal=is_causal, scale=0.2)
    for got, leaf in zip(gradients, leaves, strict=True):
        assert leaf.grad is not None
        assert (got - leaf.grad).abs().max() < 5e-2 * leaf.grad.abs().max()
