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
from tests.regret.decided import decided
from tests.regret.ranks import Effort, measure
from tests.regret.report import Report, Result, Row, table
from tests.workers import Pool

PLANS = 3


class Tiny(Case):
    """A GPT of three blocks."""

    @property
    def subject(self) -> Subject:
        return SUBJECTS["gpt"]


CASE = Tiny("gpt", "1x2", 4, "shard-or-split", Budget.WHOLE)


def _measured(path: Path) -> int:
    return measure(CASE, path, Effort(inf, steps_s=0.0, finalists=1, rounds=1))


@pytest.mark.dist
def test_a_case_is_run_from_what_is_known_of_it_to_its_line_in_the_table(
    pool: Pool, tmp_path: Path
) -> None:
    path = tmp_path / "case.json"
    begun = decided(CASE, cpu_ranks(2), most=PLANS)
    assert begun.leaf == CASE.leaf
    assert len(begun.plans) >= PLANS
    taken, other = begun.plans[:2]
    known = Row(
        plan=other,
        seconds=(9.0,),
        peak_bytes=1.0,
        predicted_s=9.0,
        predicted_peak_bytes=1.0,
        predicted_high_bytes=1.0,
        in_leaf=True,
    )
    plans = (taken, other, "dp_replicate=2 microbatch_size=2")
    begun.model_copy(update={"plans": plans, "rows": (known,)}).save(path)
    assert pool.run(_measured, path, world_size=2, timeout_s=90) == [0, 0]
    result = Result.load(path)
    assert not result.refused
    assert [row.plan for row in result.rows] == [other, taken, plans[2]]
    assert result.rows[0] == known  # it is not run again
    chosen = result.chosen
    assert chosen is not None
    assert Plan.parse(taken).world_size == 2
    assert chosen.is_final
    assert result.again
    assert not result.failed_for_memory
    assert chosen.peak_bytes <= result.limit_bytes < result.rows[-1].peak_bytes  # DDP: too short
    assert chosen.peak_bytes <= chosen.predicted_high_bytes < 1.5 * chosen.peak_bytes
    assert result.measured_at
    assert f"3/{result.legal}" in table(Report().having(result, [CASE.name]))
