"""Pipelines on cores that ranks share: against drawings by hand and a processor that is shared."""

from __future__ import annotations

import pytest

from advisor.cost import CostModel
from advisor.cost.stages.pipeline import StageTimes, play
from advisor.cost.stages.shared_cores import play_on_cores, slowest_s
from engines.plan import Plan, Schedule
from profiles.machine.cluster import ClusterProfile, SharedCores
from tests.factories import chain, cpus, exact, facts

GPIPE, ONE_F_ONE_B, NAIVE = Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.NAIVE


def on_cores(ranks: int, alone: float, *, nodes: int = 1, across: bool = False) -> ClusterProfile:
    cluster = cpus(ranks // nodes).model_copy(update={"num_nodes": nodes})
    shared = SharedCores(alone=exact(alone))
    if across:
        shared = shared.model_copy(update={"across_nodes": True})
    return cluster.model_copy(update={"shared_cores": shared})


def wall_s(
    cluster: ClusterProfile, schedule: Schedule, *, pp: int, microbatches: int, dp: int = 1
) -> float:
    """Of equal stages with a second of forward and one of backward, while all ranks compute."""
    times = StageTimes((1.0,) * pp, (1.0,) * pp, (0.0,) * pp, (0.0,) * (pp - 1))
    plan = Plan(pp=pp, dp_replicate=dp, schedule=schedule, microbatches=microbatches)
    played = play_on_cores(schedule, times, plan, cluster, microbatches=microbatches, waits=True)
    assert played.wall_s == pytest.approx(max(played.end_s))
    return played.wall_s


@pytest.mark.parametrize("ranks", [2, 4])
def test_stages_that_take_turns_run_at_the_speed_of_one_rank(ranks: int) -> None:
    """At any time one rank computes, on a core of its own."""
    alone = wall_s(on_cores(ranks, 2.0), NAIVE, pp=ranks, microbatches=3)
    assert alone == pytest.approx(3 * ranks * 2.0 / 2)


def test_cores_do_all_of_the_work_however_it_is_scheduled() -> None:
    """Two cores, eight microbatches: in a GPipe pass 1, 2, 3, then 4 ranks five times, 3, 2, 1."""
    of_pass = (1 + 1 + 1.5 + 5 * 2 + 1.5 + 1 + 1) / 2
    assert wall_s(on_cores(4, 2.0), GPIPE, pp=4, microbatches=8) == pytest.approx(2 * of_pass)


def test_a_long_round_is_as_slow_as_if_all_ranks_computed_all_the_time() -> None:
    wall = wall_s(on_cores(4, 2.0), ONE_F_ONE_B, pp=4, microbatches=200)
    assert 2.0 * 200 < wall < 2.0 * 203


def test_a_core_for_each_rank_is_the_usual_pipeline() -> None:
    times = StageTimes((1.0, 2.0), (2.0, 3.0), (0.0, 0.0), (0.5,))
    plan = Plan(pp=2, schedule=ONE_F_ONE_B, microbatches=4)
    usual = play(ONE_F_ONE_B, times, ranks=2, microbatches=4, waits=True)
    for cluster in (cpus(2), on_cores(2, 1.0)):
        played = play_on_cores(ONE_F_ONE_B, times, plan, cluster, microbatches=4, waits=True)
        assert played == usual


def test_nodes_lend_each_other_no_cores() -> None:
    """Two nodes with a core for two ranks: both replicas of a stage compute at once."""
    cluster = on_cores(4, 2.0, nodes=2)
    assert wall_s(cluster, NAIVE, pp=2, microbatches=1, dp=2) == pytest.approx(4.0)
    # Emulated nodes do: while one stage computes, its two ranks have both cores.
    emulated = on_cores(4, 2.0, nodes=2, across=True)
    assert wall_s(emulated, NAIVE, pp=2, microbatches=1, dp=2) == pytest.approx(2.0)


def test_an_estimate_has_less_idle_time_and_adds_up() -> None:
    plan = Plan(pp=4, schedule=GPIPE, microbatches=2, microbatch_size=1, precision="fp32")
    crowded = on_cores(4, 2.0)
    roomy = crowded.model_copy(update={"shared_cores": None})
    model = chain(units=8)
    shared, usual = (
        CostModel(facts(model, cluster, batch=2, precision="fp32")).estimate(plan)
        for cluster in (crowded, roomy)
    )
    # Five passes of a stage in each direction, by one or two ranks: on two cores, at full speed.
    assert shared.step_s == pytest.approx(usual.step_s / 2, rel=0.1)
    assert shared.time.total == pytest.approx(shared.step_s)


def test_the_rank_with_most_to_update_has_the_cores_of_those_that_are_done() -> None:
    plan = Plan(pp=4, schedule=GPIPE, microbatches=4)
    for seconds, expected in (((4.0, 4.0, 4.0, 4.0), 4.0), ((8.0, 0.0, 0.0, 0.0), 4.0)):
        assert slowest_s(seconds, plan, on_cores(4, 2.0)) == pytest.approx(expected)
    assert slowest_s((8.0, 1.0, 1.0, 1.0), plan, cpus(4)) == 8.0
