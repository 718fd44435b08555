"""Parameters without dimensions: shards leave them whole on every rank, and they are exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.engines.cases import CASES, Case
from tests.engines.parity import (
    gradient_error,
    local_rows,
    reference_loss,
    relative,
    sgd,
    spread,
    state_error,
)
from tests.workers import Pool

ROWS = 6


class Gain(nn.Module):
    """CLIP's way of scaling logits."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 5)
        self.gain = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x[:, -1]) * self.gain
        return logits


def _errors(plan: str) -> tuple[float, float, float, bool]:
    """Of gradients, of their norm, and of the state after a step; and whether the gain is whole."""
    case = Case(Gain, CASES["lstm"].batch, CASES["lstm"].loss_fn)
    reference, parallel = spread(case, plan, max_grad_norm=0.1)
    batch = case.batch(ROWS)
    part = local_rows(parallel, batch, ROWS)
    reference_loss(reference, case, batch).backward()
    parallel.forward_backward(part)
    gradients = gradient_error(parallel, reference)
    norm = parallel.clip_grad_norm_(0.1)
    wanted = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    parallel.optimizer.zero_grad()
    parallel.train_step(part)
    sgd(list(reference.parameters())).step()
    is_whole = type(parallel.module.get_parameter("gain").data) is Tensor
    return gradients, relative(norm, wanted), state_error(parallel, reference), is_whole


@pytest.mark.dist
@pytest.mark.parametrize(
    "plan", ["dp_shard=2", "dp_replicate=2 zero=1 accumulation=3", "dp_replicate=2 dp_shard=2"]
)
def test_scalar_parameters_stay_whole_and_their_gradients_are_averaged(
    pool: Pool, plan: str
) -> None:
    size = 4 if "dp_replicate=2 dp_shard=2" in plan else 2
    for gradients, norm, state, is_whole in pool.run(_errors, plan, world_size=size):
        assert gradients < 1e-6
        assert norm < 1e-6
        assert state < 1e-6
        assert is_whole
