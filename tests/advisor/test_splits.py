"""The committed report of `tests.validation.splits`: ResNet-50 on two CPU ranks.

Two cores that share what they compute with are no two devices: while one stands still the other is
faster, so that a pipeline gains less here than on two GPUs, whose ratios are in `test_sweep`.
"""

from __future__ import annotations

import pytest

from advisor.sweep.picture import picture
from advisor.sweep.points import Point, Sweep
from tests.validation.splits import PLANS, REPORT, SIZES, Report, table


@pytest.fixture(scope="module")
def report() -> Report:
    return Report.load(REPORT)


def seconds(sweep: Sweep) -> list[float]:
    return [point.measured.median_s for point in sweep.points if point.measured]


def is_within(point: Point) -> bool:
    """Whether what was measured, from tenth to ninetieth percentile, meets the stated range."""
    assert point.measured is not None
    return point.measured.low_s <= point.high_s and point.low_s <= point.measured.high_s


def test_one_device_in_turn_and_as_a_pipeline_are_within_their_ranges(report: Report) -> None:
    assert [point.label for point in report.plans.points] == list(PLANS)
    assert [point.devices for point in report.plans.points] == [1, 2, 2]
    assert all(is_within(point) for point in report.plans.points)


def test_small_splits_cost_more_as_predicted(report: Report) -> None:
    """Gradients are added up once for each, and few images keep a core less busy."""
    assert [point.label for point in report.sizes.points] == list(SIZES)
    measured, predicted = seconds(report.sizes), [p.step_s for p in report.sizes.points]
    assert measured.index(max(measured)) == predicted.index(max(predicted)) == 0
    assert measured[0] > 2 * min(measured)
    assert predicted[0] > 2 * min(predicted)
    outside = [point.label for point in report.sizes.points if not is_within(point)]
    assert len(outside) <= 0.25 * len(SIZES), outside


def test_it_is_shown_and_drawn(report: Report) -> None:
    shown = table(report)
    assert "plan  predicted step  measured" in shown
    assert "Fastest, as measured: split size" in shown
    for sweep in (report.plans, report.sizes):
        assert picture(sweep).startswith(b"\x89PNG")
