"""Models of which most numbers are complex, as those that multiply in the frequency domain."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.legality import problems
from engines.plan import Plan
from profiles.capture.capture import capture
from tests.engines.cases import Case, cpu_ranks, profile_of
from tests.engines.parity import (
    KINDS,
    gradient_error,
    local_rows,
    reference_loss,
    sgd,
    spread,
    state_error,
)
from tests.workers import Pool

ROWS, CHANNELS, MODES, LENGTH = 6, 6, 4, 16


class Spectral(nn.Module):
    """A product of the lowest frequencies, and an extra convolution."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CHANNELS, CHANNELS, MODES, dtype=dtype) * 0.1)
        self.mix = nn.Conv1d(CHANNELS, CHANNELS, 1, dtype=dtype.to_real())

    def forward(self, x: Tensor) -> Tensor:
        low = torch.einsum("bim,iom->bom", torch.fft.rfft(x)[..., :MODES], self.weight)
        return F.gelu(torch.fft.irfft(low, n=LENGTH) + self.mix(x))


class Operator(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.enter = nn.Linear(2, CHANNELS, dtype=dtype.to_real())
        self.blocks = nn.Sequential(Spectral(dtype), Spectral(dtype))
        self.leave = nn.Linear(CHANNELS, 1, dtype=dtype.to_real())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.leave(self.blocks(self.enter(x).mT).mT)
        return out.squeeze(-1)


def batch(rows: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(rows)
    return torch.randn(rows, LENGTH, 2, generator=made), torch.randn(rows, LENGTH, generator=made)


CASE = Case(Operator, batch, F.mse_loss)


def test_the_dtype_of_a_complex_model_is_that_of_its_real_numbers() -> None:
    for dtype, real in ((torch.complex64, "float32"), (torch.complex128, "float64")):
        sample = tuple(part.to(dtype.to_real()) for part in batch(2))
        assert capture(Operator(dtype), sample, loss_fn=F.mse_loss).dtype == real


@pytest.mark.parametrize(("plan", "is_cast"), [("dp_replicate=2", False), ("dp_shard=2", True)])
def test_complex_parameters_are_not_cast_to_sixteen_bits(plan: str, is_cast: bool) -> None:
    model = profile_of(CASE, Operator())
    in_the_way = problems(Plan.parse(f"{plan} precision=bf16"), model, cpu_ranks(2))
    said = [problem.what for problem in in_the_way if problem.rule == "complex-cast"]
    assert bool(said) == is_cast
    assert not is_cast or "complex64 ones would lose their imaginary part" in said[0]


def _trained(plan: str) -> tuple[float, float]:
    reference, parallel = spread(CASE, plan)
    optimizer = sgd(list(reference.parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        reference_loss(reference, CASE, batch(ROWS)).backward()  # type: ignore[no-untyped-call]
        parallel.forward_backward(local_rows(parallel, batch(ROWS), ROWS))
        gradient = gradient_error(parallel, reference)
        optimizer.step()
        parallel.optimizer.step()
        parallel.optimizer.zero_grad()
    return gradient, state_error(parallel, reference)


@pytest.mark.dist
@pytest.mark.parametrize("plan", [*KINDS, "pp=2 schedule=gpipe microbatches=2 stages=blocks.1"])
def test_complex_parameters_train_as_in_one_process(pool: Pool, plan: str) -> None:
    for gradient, parameter in pool.run(_trained, plan, world_size=2):
        assert gradient < 1e-5
        assert parameter < 1e-5
