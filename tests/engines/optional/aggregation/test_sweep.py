"""Measurements on shaped links: the committed reports agree with the documents."""

from __future__ import annotations

import statistics

import pytest

from advisor.cost.communication.aggregation import ONE_BY_ONE_ERROR
from engines.plan import Aggregation
from tests.benchmarks import aggregation, less_to_send
from tests.benchmarks.aggregation import Row
from tests.namespaces import why_not
from tests.validation.command import NO_FACTS

# Of what a card carries beyond the tensor: headers and acknowledgements are 66 of 1514 bytes each
# way (Ethernet, IP, TCP with its time stamps), and barriers a little.
HEADERS = 1.1
LARGEST = max(aggregation.SIZES)


@pytest.fixture(scope="module")
def report() -> aggregation.Report:
    return aggregation.repriced()


def largest(report: aggregation.Report, kind: Aggregation, ranks: int, nodes: int = 0) -> Row:
    """The row of the largest tensor."""
    return next(
        row
        for row in report.rows
        if (row.kind, row.ranks, row.nodes, row.devices, row.tensor_bytes)
        == (kind, ranks, nodes or ranks, 1, LARGEST)
    )


def test_measured_seconds_lie_in_their_predicted_ranges(report: aggregation.Report) -> None:
    """Within its stated range each; of short ones one in twenty may be disturbed."""
    outside = [
        row
        for row in report.rows
        if row.measured_s != pytest.approx(row.predicted_s, rel=row.predicted_error)
    ]
    assert all(row.tensor_bytes < LARGEST for row in outside)
    assert len(outside) <= 0.05 * len(report.rows)
    ratios = [row.predicted_s / row.measured_s for row in report.rows]
    assert statistics.median(ratios) == pytest.approx(1, rel=0.1)


def test_the_report_was_written_by_the_prices_of_today(report: aggregation.Report) -> None:
    """Else `python -m tests.benchmarks.aggregation` writes another one."""
    for row, now in zip(aggregation.Report.load(aggregation.REPORT).rows, report.rows, strict=True):
        assert row.predicted_s == pytest.approx(now.predicted_s)
        assert row.predicted_error == now.predicted_error


def test_the_parameter_devices_link_is_the_bottleneck(report: aggregation.Report) -> None:
    """It carries 2(n-1) tensors, with every rank two more, and its memory n - 1; a ring's card
    sends and receives 2(n-1)/n."""
    for ranks in (2, 3, 4):
        device = largest(report, Aggregation.GATHER, ranks)
        ring = largest(report, Aggregation.RING, ranks)
        carried, wanted = device.card_bytes / LARGEST, 2 * (ranks - 1)
        assert wanted <= carried <= HEADERS * wanted
        carried, wanted = ring.card_bytes / LARGEST, 2 * 2 * (ranks - 1) / ranks
        assert wanted <= carried <= HEADERS * wanted
        assert device.buffer_bytes == (ranks - 1) * LARGEST
        # In and out one after the other, against both at once.
        times = device.measured_s / ring.measured_s
        assert times == pytest.approx(ranks, rel=ONE_BY_ONE_ERROR)


def test_a_hierarchy_sends_less_between_nodes_and_is_faster(report: aggregation.Report) -> None:
    own = largest(report, Aggregation.BACKEND, 4, nodes=2)
    hierarchy = largest(report, Aggregation.HIERARCHICAL, 4, nodes=2)
    assert own.card_bytes / hierarchy.card_bytes == pytest.approx(1.5, rel=0.05)
    assert own.measured_s > 1.2 * hierarchy.measured_s


def test_the_plan_chosen_at_100_mbit_is_three_times_as_fast_and_learns_as_well() -> None:
    report = less_to_send.Report.load(less_to_send.REPORT)
    plain, chosen = report.plain, report.chosen
    assert plain.step_s >= less_to_send.LEAST_GAIN * chosen.step_s
    for row in report.rows:
        assert row.last_loss <= plain.last_loss * (1 + less_to_send.TOLERANCE)
        assert row.losses[0] == pytest.approx(plain.losses[0], abs=1e-3)
    assert "compression" in chosen.plan


def test_steps_of_every_compression_lie_in_their_predicted_ranges() -> None:
    report = less_to_send.repriced()
    if report.cluster is None:
        pytest.skip(NO_FACTS)
    for row in report.rows:
        assert row.predicted_low_s <= row.step_s <= row.predicted_high_s, row.plan


def test_tables_have_a_line_for_every_row(report: aggregation.Report) -> None:
    assert aggregation.table(report).count("\n") == 1 + len(report.rows)
    document = less_to_send.Report.load(less_to_send.REPORT)
    lines = 1 + len(document.rows) + (document.cluster is None)
    assert less_to_send.table(document).count("\n") == lines


@pytest.mark.timed
def test_a_new_sweep_agrees() -> None:
    missing = why_not()
    if missing:
        pytest.skip(missing)
    measured = aggregation.measure()
    test_measured_seconds_lie_in_their_predicted_ranges(measured)
    test_the_parameter_devices_link_is_the_bottleneck(measured)
    test_a_hierarchy_sends_less_between_nodes_and_is_faster(measured)
