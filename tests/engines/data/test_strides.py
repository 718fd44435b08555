"""Parameters that do not lie row after row in memory: of models in channels last, and those that
an initialization transposed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engines.cases import Case
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

ROWS, SIDE, WIDTH = 4, 4, 8


class Rotated(nn.Module):
    """Convolutions in channels last, and a rotation as `torch.linalg.qr` returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.inner = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.rotation = nn.Parameter(torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0])
        self.leave = nn.Linear(WIDTH, 2)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(F.gelu(self.enter(x))).mean((2, 3))
        return self.leave(out @ self.rotation)


def batch(rows: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 3, SIDE, SIDE, generator=made), torch.randn(rows, 2, generator=made)


CASE = Case(Rotated, batch, F.mse_loss)


def _trained(plan: str) -> tuple[float, float]:
    reference, parallel = spread(CASE, plan)
    optimizer = sgd(list(reference.parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        reference_loss(reference, CASE, batch(ROWS)).backward()  # type: ignore[no-untyped-call]
        parallel.forward_backward(local_rows(parallel, batch(ROWS), ROWS))
        gradients = gradient_error(parallel, reference)
        optimizer.step()
        parallel.optimizer.step()
        parallel.optimizer.zero_grad()
    return gradients, state_error(parallel, reference)


@pytest.mark.dist
@pytest.mark.parametrize("plan", KINDS)
def test_they_are_replicated_and_sharded_like_others(pool: Pool, plan: str) -> None:
    assert any(not parameter.is_contiguous() for parameter in Rotated().parameters())
    for gradients, state in pool.run(_trained, plan, world_size=2):
        assert gradients < 1e-5
        assert state < 1e-5
