"""The pool itself: results in order, failures told, nothing left hanging."""

from __future__ import annotations

import os
import time

import pytest

from tests.workers import Pool, RankFailure, barrier_then


def _fail_on_rank_one() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("rank one gives up")
    dist.barrier()


def _pid_after_sleep(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def _die() -> None:
    os._exit(3)


@pytest.mark.dist
def test_results_come_back_in_rank_order(pool: Pool) -> None:
    assert pool.run(barrier_then, ["a", "b", "c"], world_size=3) == ["a", "b", "c"]


@pytest.mark.dist
def test_processes_are_kept_between_runs(pool: Pool) -> None:
    first = pool.run(_pid_after_sleep, 0.0, world_size=2)
    assert pool.run(_pid_after_sleep, 0.0, world_size=2) == first


@pytest.mark.dist
@pytest.mark.slow
def test_a_failing_rank_is_named_and_never_leaves_the_others_hanging() -> None:
    ranks = Pool(2)
    try:
        ranks.run(barrier_then, [0, 0], world_size=2)
        began = time.monotonic()
        with pytest.raises(RankFailure, match=r"(?s)rank 1: .*rank one gives up"):
            ranks.run(_fail_on_rank_one, world_size=2, timeout_s=30)
        assert time.monotonic() - began < 10
        with pytest.raises(RankFailure, match="rank 0: the process died"):
            ranks.run(_die, world_size=1)
        with pytest.raises(RankFailure, match="rank 0: did not finish"):
            ranks.run(_pid_after_sleep, 60.0, world_size=1, timeout_s=8)
    finally:
        ranks.close()


@pytest.mark.dist
def test_closing_reaps_every_process() -> None:
    ranks = Pool(1)
    (pid,) = ranks.run(_pid_after_sleep, 0.0, world_size=1)
    ranks.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
