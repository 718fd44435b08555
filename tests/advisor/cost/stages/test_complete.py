"""Defaults of plans with stages or split layers; the completed plans train."""

from __future__ import annotations

import copy
from itertools import combinations, pairwise

import pytest
import torch

from advisor.auto.parallelize import auto_parallelize
from advisor.cost.stages.complete import completed, even_stages
from advisor.decide.decision import Decision
from engines.legality import problems
from engines.plan import PartialPlan, Plan, Schedule
from profiles.errors import InputError
from tests.engines.cases import CASES, cpu_ranks, profile_of
from tests.engines.parity import gradient_error, local_rows, reference_loss, relative, sgd
from tests.workers import Pool

CASE = CASES["gpt"]
PROFILE = profile_of(CASE, CASE.build(), rows=8)
COLUMN = (("blocks.*", "column"),)


def complete(world_size: int = 4, rows: int = 8, **settings: object) -> Plan:
    return completed(
        PartialPlan.build(settings),
        PROFILE,
        cpu_ranks(world_size),
        rows=rows,
        styles=lambda size: COLUMN,
    )


def test_devices_without_a_degree_hold_replicas() -> None:
    assert str(complete(8, tp=2)) == "dp_replicate=4 tp=2 tensor_styles=blocks.*:column"
    assert complete(8, tp=2, dp_shard=4).dp_replicate == 1
    assert complete(4, servers=1).dp_replicate == 3


def test_given_settings_are_kept() -> None:
    partial = PartialPlan.build(
        {"schedule": "gpipe", "stages": ("norm",), "microbatches": 2, "pp": 2}
    )
    plan = complete(2, **partial.fixed)
    assert (plan.schedule, plan.stages, plan.microbatches) == (Schedule.GPIPE, ("norm",), 2)


@pytest.mark.parametrize(
    ("rows", "microbatches"), [(64, 8), (8, 8), (6, 6), (2, 2), (12, 12), (36, 12), (3, 2)]
)
def test_microbatches_are_four_a_stage_where_the_rows_divide(rows: int, microbatches: int) -> None:
    assert complete(2, rows, pp=2).microbatches == microbatches


@pytest.mark.parametrize(("pp", "schedule"), [(2, "1f1b"), (3, "gpipe"), (2, "zbv")])
def test_no_other_stage_borders_balance_the_work_better(pp: int, schedule: str) -> None:
    plan = Plan(pp=pp, schedule=Schedule(schedule))
    units = [unit for unit in PROFILE.units if unit.name not in ("(loss)", "(glue)")]
    names = [unit.name for unit in units]

    def largest(stages: tuple[str, ...]) -> float:
        ends = [0, *map(names.index, stages), len(names)]
        work = [unit.flop(1) for unit in units]
        return max(sum(work[a:b]) for a, b in pairwise(ends))

    borders = even_stages(plan, PROFILE, cpu_ranks(pp))
    best = min(largest(stages) for stages in combinations(names[1:], len(borders)))
    assert len(borders) == (3 if schedule == "zbv" else pp - 1)
    assert largest(borders) == pytest.approx(best)


def test_legality_reports_more_stages_than_units() -> None:
    violations = problems(complete(99, pp=99), PROFILE, cpu_ranks(99))
    assert "stages-too-many" in {problem.rule for problem in violations}


def _errors_and_plan(settings: str) -> tuple[float, float, str]:
    torch.manual_seed(1)
    reference = CASE.build()
    parallel = auto_parallelize(
        copy.deepcopy(reference),
        sample=CASE.batch(4),
        loss_fn=CASE.loss_fn,
        optimizer=sgd,
        plan=settings,
        global_batch_size=8,
        cluster=cpu_ranks(4),
    )
    batch = CASE.batch(8)
    loss = parallel.forward_backward(local_rows(parallel, batch, 8))
    expected = reference_loss(reference, CASE, batch)
    expected.backward()  # type: ignore[no-untyped-call]
    assert isinstance(parallel.decision, Decision)
    assert parallel.decision.plan == parallel.plan
    error = relative(loss, expected.detach())
    return error, gradient_error(parallel, reference), str(parallel.plan)


@pytest.mark.dist
@pytest.mark.parametrize("settings", ["pp=2 tp=2", "tp=2 zero=1", "pp=2 dp_shard=2"])
def test_plans_that_give_only_degrees_train(pool: Pool, settings: str) -> None:
    for loss, gradient, plan in pool.run(_errors_and_plan, settings, world_size=4):
        assert loss < 1e-5
        assert gradient < 1e-5
        assert all(word.split("=")[0] in plan for word in settings.split())


def _refusal() -> str:
    with pytest.raises(InputError) as caught:  # rank 0 decides and broadcasts the error
        _errors_and_plan("pp=4 stages=blocks.1")
    return str(caught.value)


@pytest.mark.dist
def test_too_few_stage_borders_are_refused_on_every_rank(pool: Pool) -> None:
    for what in pool.run(_refusal, world_size=4):
        assert "pp=4 needs 3 borders, `stages` names 1" in what
        assert "plan: pp=4 stages=blocks.1" in what
