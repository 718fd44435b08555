"""A state that a stage writes in place while backwards of earlier microbatches need it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from profiles.errors import ModelError, RankError
from tests.engines.cases import Case
from tests.engines.parity import spread
from tests.workers import Pool

PLAN = "pp=2 schedule=gpipe microbatches=2 stages=1"


class Fading(nn.Module):
    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.out, self.in_place = nn.Linear(6, 6), in_place
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.scale.mul_(0.9)
        else:
            self.scale = 0.9 * self.scale
        out: Tensor = self.out(x) * self.scale
        return out


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, 6), torch.randint(0, 3, (rows,))


def _step(in_place: bool) -> tuple[str, str]:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), Fading(in_place=in_place), nn.Linear(6, 3))

    _, parallel = spread(Case(build, _batch), PLAN, rows=4)
    try:
        parallel.train_step(_batch(4))
    except (ModelError, RankError) as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.dist
def test_a_write_in_place_that_an_earlier_microbatch_needs_is_named(pool: Pool) -> None:
    results = pool.run(_step, True, world_size=2)
    (error,) = [text for kind, text in results if kind == "ModelError"]
    assert "a stage writes in place into a tensor that the backward of an earlier" in error
    assert "\n  RuntimeError: one of the variables needed for gradient computation" in error
    assert "`self.mean = 0.9 * self.mean`" in error


@pytest.mark.dist
def test_a_state_that_is_put_in_the_place_of_the_last_one_is_trained_with(pool: Pool) -> None:
    assert pool.run(_step, False, world_size=2) == [("", "")] * 2
