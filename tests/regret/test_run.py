"""A case from the decision to the table, on two local ranks; no clock is compared."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from engines.plan import Plan
from tests.engines.cases import CASES as SUBJECTS
from tests.engines.cases import Case as Subject
from tests.engines.cases import cpu_ranks
from tests.regret.cases import Budget, Case
from tests.regret.ranks import Effort, decided, measure
from tests.regret.report import Report, Result, table
from tests.workers import Pool

PLANS = 4


class Tiny(Case):
    """A GPT of three blocks."""

    @property
    def subject(self) -> Subject:
        return SUBJECTS["gpt"]


CASE = Tiny("gpt", "1x2", 4, "shard-or-split", Budget.WHOLE)


def _measured(path: Path) -> int:
    return measure(CASE, path, Effort(inf, steps_s=0.0, finalists=2, rounds=1))


@pytest.mark.dist
def test_a_case_is_decided_run_and_goes_on_where_it_stopped(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    begun = decided(CASE, cpu_ranks(2), most=PLANS)
    assert begun.leaf == CASE.leaf
    plans = (*begun.plans[: PLANS - 1], "dp_replicate=2 microbatch_size=2")
    begun.model_copy(update={"plans": plans}).save(path)
    assert pool.run(_measured, path, world_size=2, timeout_s=90) == [0, 0]
    result = Result.load(path)
    assert not result.refused
    assert tuple(row.plan for row in result.rows) == plans
    chosen = result.chosen
    assert chosen is not None
    assert Plan.parse(chosen.plan).world_size == 2
    assert chosen.is_final
    assert result.again
    assert not result.failed_for_memory
    assert chosen.peak_bytes <= result.limit_bytes < result.rows[-1].peak_bytes  # DDP: too short
    assert chosen.peak_bytes <= chosen.predicted_high_bytes < 1.5 * chosen.peak_bytes
    assert f"{PLANS}/{result.legal}" in table(Report().having(result, [CASE.name]))
    # Ranks that are started anew run what is not there yet, and nothing else.
    result.model_copy(update={"rows": result.rows[:-1], "measured_at": ""}).save(path)
    assert pool.run(_measured, path, world_size=2, timeout_s=90) == [0, 0]
    again = Result.load(path)
    assert [row.peak_bytes for row in again.rows] == [row.peak_bytes for row in result.rows]
    assert again.measured_at
