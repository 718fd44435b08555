"""Parameters that a forward changes: refused where replicas would have others."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiles.errors import PlanError
from tests.engines.cases import Case, token_loss
from tests.engines.parity import local_rows, reference_loss, sgd, spread, state_error
from tests.workers import Pool

ROWS, WIDTH = 8, 6


class Bounded(nn.Module):
    """An embedding whose rows are shortened when they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, WIDTH, max_norm=0.5), nn.Linear(WIDTH, 32)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(ids))
        return logits


class Clamped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Following(nn.Module):
    """An encoder that follows another one, whatever the rows are."""

    def __init__(self) -> None:
        super().__init__()
        self.learns = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 5))
        self.follows = copy.deepcopy(self.learns).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            pairs = zip(self.learns.parameters(), self.follows.parameters(), strict=True)
            for own, other in pairs:
                other.lerp_(own, 0.1)
        out: Tensor = self.learns(x) + self.follows(x)
        return out


def _ids(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    ids = torch.randint(0, 32, (rows, 3))
    return ids[:, :-1], ids[:, 1:]


def _rows(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, WIDTH), torch.randint(0, 5, (rows,))


CASES = {
    "bounded": Case(Bounded, _ids, token_loss),
    "clamped": Case(lambda: nn.Sequential(Clamped(WIDTH, WIDTH), nn.Linear(WIDTH, 5)), _rows),
    "following": Case(Following, _rows, F.cross_entropy),
}


def _refusal(name: str, plan: str) -> str:
    try:
        spread(CASES[name], plan, rows=ROWS)
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2"])
def test_a_parameter_that_replicas_would_change_otherwise_is_refused(pool: Pool, plan: str) -> None:
    for error in pool.run(_refusal, "bounded", plan, world_size=2):
        assert "`embed.weight` by the rows that it sees" in error


def _drift(name: str, plan: str) -> float:
    case = CASES[name]
    reference, parallel = spread(case, plan, rows=ROWS)
    optimizer = sgd([p for p in reference.parameters() if p.requires_grad])
    for step in range(3):
        batch = case.batch(ROWS + step)
        reference_loss(reference, case, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        parallel.train_step(local_rows(parallel, batch, ROWS + step))
    return state_error(parallel, reference)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("clamped", "dp_replicate=2"),
        ("clamped", "dp_shard=2"),
        ("following", "dp_replicate=2"),
        ("following", "dp_shard=2"),
    ],
)
def test_parameters_that_follow_others_or_bounds_are_those_of_one_process(
    pool: Pool, name: str, plan: str
) -> None:
    assert max(pool.run(_drift, name, plan, world_size=2)) < 1e-5
