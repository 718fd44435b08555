"""Regret, correlation and verdicts of results that were written by hand."""

from __future__ import annotations

import pytest

from tests.engines.cases import cpu_ranks
from tests.regret.cases import limited
from tests.regret.report import Report, Result, Row, spearman, table

DDP, ZERO = "dp_replicate=4 microbatch_size=4", "dp_shard=4 microbatch_size=4"
STAGES = "pp=4 microbatch_size=4 microbatches=4 schedule=1f1b stages=1,2,3"


def _row(plan: str, *seconds: float, peak: float = 1.0, predicted: float = 1.0) -> Row:
    return Row(
        plan=plan,
        seconds=seconds,
        is_final=True,
        peak_bytes=peak,
        predicted_s=predicted,
        predicted_peak_bytes=1.0,
        predicted_high_bytes=1.0,
        in_leaf=plan != STAGES,
    )


def _result(*rows: Row, again: tuple[float, ...] = (), dissent: str | None = None) -> Result:
    """Of four ranks with 2 bytes each, under a leaf that names DDP before ZeRO."""
    return Result(
        name="a case",
        cluster=limited(cpu_ranks(4, nodes=2), 2.0),
        leaf="replicate",
        families=("DDP", "ZeRO (FSDP)"),
        dissent=dissent,
        plans=tuple(row.plan for row in rows),
        legal=100,
        rows=rows,
        again=again,
    )


def test_regret_is_of_the_chosen_plans_median_over_the_best_ones() -> None:
    result = _result(_row(DDP, 1.2, 1.1, 9.0), _row(ZERO, 1.0), again=(1.2, 1.2, 1.2))
    assert result.regret == pytest.approx(0.2)
    assert result.best.plan == ZERO


def test_the_best_plan_has_no_regret_whatever_its_second_run_took() -> None:
    result = _result(_row(DDP, 1.0), _row(ZERO, 1.1), again=(1.3,))
    assert result.regret == 0
    assert result.noise == pytest.approx(0.3)


def test_a_plan_that_does_not_fit_is_not_the_best() -> None:
    result = _result(_row(DDP, 1.2), _row(ZERO, 1.0, peak=2.5), again=(1.2,))
    assert result.regret == 0


def test_a_choice_that_failed_for_memory_has_no_finite_regret() -> None:
    failed = _result(_row(ZERO, 1.0)).model_copy(update={"failed_for_memory": True})
    assert failed.regret == float("inf")
    assert "FAILED FOR MEMORY" in table(Report(results=(failed,)))


# Scores of 10 pupils and their ranks' correlation, -29/165, as worked out in Wikipedia's
# "Spearman's rank correlation coefficient".
IQ = (106, 100, 86, 101, 99, 103, 97, 113, 112, 110)
HOURS = (7, 27, 2, 50, 28, 29, 20, 12, 6, 17)


def test_spearman_is_that_of_a_worked_example() -> None:
    assert spearman(IQ, HOURS) == pytest.approx(-29 / 165)
    assert spearman([1.0, 1.0, 2.0], [3.0, 3.0, 4.0]) == pytest.approx(1.0)


def test_documents_order_disagrees_where_a_later_family_is_faster_by_more_than_a_tie() -> None:
    assert _result(_row(DDP, 1.04), _row(ZERO, 1.0)).agrees
    assert not _result(_row(DDP, 1.2), _row(ZERO, 1.0)).agrees


def test_the_tree_is_wrong_only_if_a_faster_plan_outside_of_it_was_not_shown() -> None:
    faster = (_row(DDP, 1.2), _row(STAGES, 1.0))
    assert not _result(*faster).is_right
    assert _result(*faster, dissent="PP over 4 is predicted 17 % faster").is_right


def test_a_report_keeps_other_cases_and_their_order() -> None:
    first, second = (
        _result(_row(DDP, 1.0)).model_copy(update={"name": name}) for name in ("one", "two")
    )
    report = Report().broke("one", "no ranks").having(second, ["one", "two"])
    report = report.having(first, ["one", "two"])
    assert [result.name for result in report.results] == ["one", "two"]
    assert not report.broken
