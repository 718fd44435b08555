"""A rank that is made slow is named with its factor; nothing else of a step counts as its own."""

from __future__ import annotations

import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from engines.plan import Plan
from engines.runtime.rank_times import Imbalance, RankTime, why_not_measured
from engines.runtime.steps import WARM_UP_STEPS
from engines.runtime.world import World
from profiles.errors import InputError, PlanError
from tests.engines.parity import alone, local_rows, parallelize
from tests.workers import Pool

NAP_S = 0.06
SLOW = 1
STEPS = WARM_UP_STEPS + 4


def _with_a_slow_rank(plan: str, where: str) -> tuple[Imbalance, str]:
    case, _, parallel = parallelize("gpt", plan)
    batch = local_rows(parallel, case.batch(8), 8)
    is_slow = dist.get_rank() == SLOW
    if where == "forward" and is_slow:
        block = parallel.module.get_submodule("blocks.1")
        block.register_forward_hook(lambda *_: time.sleep(NAP_S), prepend=True)
    with pytest.raises(InputError, match="0 steps were timed, 3 are wanted after 3 of warm-up"):
        parallel.imbalance()
    parallel._rank_timer._compared_at = STEPS  # sooner than a training that is kept does
    with patch("engines.runtime.rank_times.log") as log:
        for _ in range(STEPS):
            assert parallel.steps.pace is None
            parallel.train_step(batch)
            if where == "loader" and is_slow:
                time.sleep(NAP_S)
    if dist.get_rank() == 0:  # one rank says it, of itself
        step, times = log.warning.call_args.args[1:]
        assert (step, times.slowest) == (STEPS, SLOW)
    pace = parallel.steps.pace
    actual = parallel.imbalance()
    assert pace is not None
    assert pace.slowest == SLOW
    assert pace.straggling > 0.5 or (plan, where) == ("dp_shard=2", "loader")
    assert parallel.steps.pace == pace  # of the same steps
    return actual, str(actual)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("plan", "where"),
    [("dp_replicate=2", "forward"), ("dp_replicate=2", "loader"), ("dp_shard=2", "forward")],
)
def test_the_slow_rank_is_named_with_its_factor(pool: Pool, plan: str, where: str) -> None:
    answers = pool.run(_with_a_slow_rank, plan, where, world_size=2)
    assert answers[0] == answers[1]  # every rank says the same
    actual, text = answers[0]
    slow, other = actual.ranks[SLOW], actual.ranks[1 - SLOW]
    assert actual.slowest == SLOW
    assert actual.factor == pytest.approx(slow.own_s / other.own_s)
    assert actual.factor > 1.5
    assert text.startswith("rank 1 is the slowest: ")
    # The nap is where it was taken, and the other rank waited for it where that can be told.
    of_slow, of_other = (
        (rank.outside_s if where == "loader" else rank.computing_s) for rank in (slow, other)
    )
    assert of_slow - of_other > 0.7 * NAP_S
    if plan == "dp_replicate=2":
        assert other.waiting_s is not None
        assert other.waiting_s > 0.7 * NAP_S
        assert ", which wait " in text


def test_the_summary_names_the_slowest_rank() -> None:
    """Three ranks of 100 ms and one of 150: half as long again."""
    quick = RankTime(outside_s=0.01, computing_s=0.09, waiting_s=0.06)
    slow = RankTime(outside_s=0.01, computing_s=0.14, waiting_s=0.01)
    actual = Imbalance(ranks=(quick, quick, slow, quick), steps=5)
    assert (actual.slowest, actual.factor) == (2, pytest.approx(1.5))
    assert str(actual) == (
        "rank 2 is the slowest: 150 ms of its own a step (140 ms computing, 10.0 ms outside),"
        " 1.50 times the median of the others, which wait 60.0 ms"
    )
    even = Imbalance(ranks=(quick, RankTime(0.01, 0.095, 0.0)), steps=5)
    assert str(even) == "even: 2 ranks take 100 ms to 105 ms of their own a step"


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("dp_replicate=2 tp=2", "inside every forward"),
        ("pp=2", "inside every forward"),
        ("dp_shard=2 compile=true", "compiled units"),
        ("dp_shard=2", ""),
        ("dp_replicate=2 compile=true", ""),
    ],
)
def test_plans_without_times_of_single_ranks_are_reported(plan: str, said: str) -> None:
    world = World(rank=0, size=4, device=torch.device("cpu"), timeout_s=1.0)
    reason = why_not_measured(Plan.parse(plan), world)
    assert said in reason
    assert bool(reason) == bool(said)


def test_a_rank_whose_others_do_not_exist_trains_on_without_comparing_itself() -> None:
    world = World(rank=0, size=4, device=torch.device("cpu"), timeout_s=1.0, is_fake=True)
    assert "do not exist" in why_not_measured(Plan.parse("dp_shard=4"), world)


def test_one_rank_has_no_imbalance() -> None:
    _, parallel = alone("gpt")
    with pytest.raises(PlanError, match="there is one rank"):
        parallel.imbalance()
