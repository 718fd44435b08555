"""Measurements on shaped links: the committed report agrees with the documents."""

from __future__ import annotations

import statistics

import pytest

from tests.benchmarks import updates
from tests.benchmarks.updates import BACKUP, LOCAL, ONE_SERVER, PLAIN, PLANS, SLEEP_S, Report
from tests.namespaces import why_not
from tests.validation.command import NO_FACTS

ASYNCHRONOUS = f"{ONE_SERVER} updates=asynchronous"
BACKUP_OF_TWO = "dp_replicate=1 servers=2 backup_workers=1"


@pytest.fixture(scope="module")
def report() -> Report:
    return updates.repriced()


def late(report: Report, plan: str) -> float:
    """The straggler's cost in a step of the others, over its sleep."""
    with_it, without = report.row(plan, straggler=True), report.row(plan)
    return (with_it.step_s - without.step_s) / SLEEP_S


def test_measured_steps_lie_in_their_predicted_ranges(report: Report) -> None:
    """Within its range each, with the straggler and without."""
    if report.cluster is None:
        pytest.skip(NO_FACTS)
    assert [(row.plan, row.sleep_s) for row in report.rows if not row.is_in_range] == []
    ratios = [row.predicted_s / row.step_s for row in report.rows]
    assert statistics.median(ratios) == pytest.approx(1, rel=0.15)


def test_a_straggler_delays_synchronous_steps_by_its_sleep(report: Report) -> None:
    """Local steps no less: it is late in each of them. Where the others' gradients are on their way
    to a server meanwhile, that much is hidden."""
    for plan in (PLAIN, f"{LOCAL}4", f"{LOCAL}16"):
        assert late(report, plan) == pytest.approx(1, rel=0.1)
    assert 0.4 < late(report, ONE_SERVER) < 0.9


def test_a_backup_worker_hides_a_straggler(report: Report) -> None:
    for plan in (BACKUP, BACKUP_OF_TWO):
        assert late(report, plan) < 0.1


def test_asynchronous_updates_do_not_wait_and_bounded_ones_do(report: Report) -> None:
    assert late(report, ASYNCHRONOUS) < 0.1
    assert late(report, f"{ASYNCHRONOUS} max_staleness=1") > 0.5


def test_local_steps_divide_the_traffic_by_their_number(report: Report) -> None:
    """By the kernel's count, and the time of a step with it."""
    plain = report.row(PLAIN)
    for every in (4, 16):
        local = report.row(f"{LOCAL}{every}")
        assert plain.sent_bytes / local.sent_bytes == pytest.approx(every, rel=0.1)
    assert plain.step_s > 5 * report.row(f"{LOCAL}16").step_s


def test_sent_bytes_are_the_predicted_bytes_and_headers(report: Report) -> None:
    for row in report.rows:
        assert row.predicted_bytes < row.sent_bytes < 1.1 * row.predicted_bytes


def test_a_second_server_halves_the_step(report: Report) -> None:
    one, two = report.row(BACKUP), report.row("dp_replicate=2 servers=2")
    assert one.step_s > 1.8 * two.step_s


def test_the_table_has_a_line_for_every_row(report: Report) -> None:
    assert len(report.rows) == 2 * len(PLANS)
    assert updates.table(report).count("\n") == 1 + len(report.rows) + (report.cluster is None)


@pytest.mark.timed
def test_a_new_measurement_agrees() -> None:
    missing = why_not()
    if missing:
        pytest.skip(missing)
    measured = updates.measure()
    test_measured_steps_lie_in_their_predicted_ranges(measured)
    test_a_backup_worker_hides_a_straggler(measured)
    test_local_steps_divide_the_traffic_by_their_number(measured)
