"""Factories of random data on the ranks of one job."""

from __future__ import annotations

import pytest
import torch

from advisor.auto.check import CheckRequest
from advisor.auto.measure import repeated
from tests.workers import Pool

FACTORY = "tests.advisor.auto.verify_subjects:build"


def _drawn() -> float:
    import torch.distributed as dist

    torch.manual_seed(dist.get_rank())
    return float(CheckRequest(FACTORY).built().sample[0].sum())  # type: ignore[index]


@pytest.mark.dist
def test_every_rank_draws_the_same_rows(pool: Pool) -> None:
    first, second = pool.run(_drawn, world_size=2)
    assert first == second


def test_rows_are_repeated_along_the_dimension_that_they_have() -> None:
    sample = {"frames": torch.arange(6).reshape(3, 2), "positions": torch.arange(3), "scale": 2.0}
    batch = repeated(sample, 5, {"frames": 1, "positions": None})
    assert isinstance(batch, dict)
    assert torch.equal(
        batch["frames"], torch.tensor([[0, 1] * 2 + [0], [2, 3] * 2 + [2], [4, 5] * 2 + [4]])
    )
    assert torch.equal(batch["positions"], torch.arange(3))
    assert batch["scale"] == 2.0
