"""The committed report of `tests.validation.splits`: ResNet-50 on two CPU ranks.

Its cores are shared with other work: the same step took up to twice as long a few minutes later,
and so did the bench that predictions rest on. What all points of a sweep have in common is that,
and is divided out here; their ranges are. Two such cores are no two devices either: while one
stands still the other is faster, so that a pipeline gains less than on two GPUs, whose ratios are
in `test_sweep`.
"""

from __future__ import annotations

import statistics

import pytest

from advisor.sweep.picture import picture
from advisor.sweep.points import Sweep
from tests.validation.splits import PLANS, REPORT, SIZES, Report, table


@pytest.fixture(scope="module")
def report() -> Report:
    return Report.load(REPORT)


def seconds(sweep: Sweep) -> list[float]:
    return [point.measured.median_s for point in sweep.points if point.measured]


def outside(sweep: Sweep) -> list[str]:
    """Points whose measured share of the sweep's median is not in the stated range of theirs."""
    ratios = [m / p.step_s for m, p in zip(seconds(sweep), sweep.points, strict=True)]
    usual = statistics.median(ratios)
    return [
        point.label
        for ratio, point in zip(ratios, sweep.points, strict=True)
        if not point.low_s <= ratio / usual * point.step_s <= point.high_s
    ]


def test_one_device_in_turn_and_as_a_pipeline(report: Report) -> None:
    assert [point.label for point in report.plans.points] == list(PLANS)
    assert [point.devices for point in report.plans.points] == [1, 2, 2]
    assert outside(report.plans) == []


def test_small_splits_cost_more_as_predicted(report: Report) -> None:
    """Gradients are added up once for each, and few images keep a core less busy."""
    assert [point.label for point in report.sizes.points] == list(SIZES)
    measured, predicted = seconds(report.sizes), [p.step_s for p in report.sizes.points]
    assert measured.index(max(measured)) == predicted.index(max(predicted)) == 0
    assert measured[0] > 2 * min(measured)
    assert predicted[0] > 2 * min(predicted)
    assert outside(report.sizes) == []


def test_it_is_shown_and_drawn(report: Report) -> None:
    shown = table(report)
    assert "plan  predicted step  measured" in shown
    assert "Fastest, as measured: split size" in shown
    for sweep in (report.plans, report.sizes):
        assert picture(sweep).startswith(b"\x89PNG")
