"""Rates that come apart while ranks train are found and named, where no parameter shows it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from profiles.errors import RankMismatchError
from tests.engines.parity import local_rows, parallelize
from tests.workers import Pool


def _one_rank_follows_another_schedule(plan: str, folder: str, at: int) -> list[str]:
    """The errors of three steps and of a save, where rank 1 has another rate after step `at`."""
    case, _, parallel = parallelize("gpt", plan, check_replicas_every=2)
    said = []
    for step in range(1, 4):
        try:
            parallel.train_step(local_rows(parallel, case.batch(8), 8))
        except RankMismatchError as error:
            said.append(f"step {step}: {error}")
            break
        for group in parallel.optimizer.param_groups:
            group["lr"] = 0.5 if step == at and dist.get_rank() == 1 else 0.25
    try:
        parallel.save(folder)
    except RankMismatchError as error:
        said.append(f"save: {error}")
    return said


@pytest.mark.dist
def test_another_rate_of_one_rank_stops_the_training(pool: Pool, tmp_path: Path) -> None:
    args = ("dp_shard=2", str(tmp_path), 2)
    for said in pool.run(_one_rank_follows_another_schedule, *args, world_size=2):
        assert [text.split(":")[0] for text in said] == ["step 3", "save"]
        assert "parameter group 0: rank 0 has lr=0.25, rank 1 has lr=0.5" in said[0]
        assert "after step 2" in said[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.dist
def test_a_rate_that_all_ranks_change_is_their_own_affair(pool: Pool, tmp_path: Path) -> None:
    args = ("dp_shard=2", str(tmp_path), 99)
    assert pool.run(_one_rank_follows_another_schedule, *args, world_size=2) == [[], []]
