"""Runs that were predicted and measured: (predicted, measured) of each report's, seconds or bytes.

Predictions are those that a report holds: made from the bench of the same machines.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from tests.benchmarks import aggregation, less_to_send, updates
from tests.peers.results import Answer, Entry, Peers, Race
from tests.regret.report import Report, Row
from tests.validation import splits

Pairs = list[tuple[float, float]]


def plan_times(report: Report) -> Pairs:
    """Steps of every plan that was run."""
    return [(row.predicted_s, row.step_s) for row in _rows(report)]


def plan_peaks(report: Report) -> Pairs:
    """Tensors of every plan that was run, on its fullest rank."""
    return [(row.predicted_peak_bytes, row.peak_bytes) for row in _rows(report)]


def _rows(report: Report) -> list[Row]:
    return [row for result in report.results for row in result.rows]


def peer_times(peers: Peers) -> Pairs:
    """Steps of the scripts that our planner was asked about."""
    return [
        (one.step_s, median(entry.turns_s) / race.steps)
        for one, race, entry in _asked(peers)
        if one.step_s is not None and entry.turns_s
    ]


def peer_peaks(peers: Peers) -> Pairs:
    """Tensors of the scripts that our planner was asked about."""
    return [
        (one.peak_bytes, float(entry.peak_bytes))
        for one, _, entry in _asked(peers)
        if one.peak_bytes is not None and entry.peak_bytes
    ]


def _asked(peers: Peers) -> Iterator[tuple[Answer, Race, Entry]]:
    for one in peers.answers:
        race = peers.race(one.subject, one.link)
        entry = race.entry(one.script) if race and one.planner == OURS else None
        if race and entry:
            yield one, race, entry


OURS = "ours"
"""Of planners, and of scripts."""


def update_times(report: updates.Report) -> Pairs:
    """Steps of ranks that update apart from each other."""
    return [(row.predicted_s, row.step_s) for row in report.rows]


def lean_times(report: less_to_send.Report) -> Pairs:
    """Steps of plans that send less."""
    return [(row.predicted_s, row.step_s) for row in report.rows]


def split_times(report: splits.Report) -> Pairs:
    """Steps of a model cut in two, by the size of its microbatches, and in one piece."""
    points = (*report.plans.points, *report.sizes.points)
    return [(point.step_s, point.measured.median_s) for point in points if point.measured]


def sum_times(report: aggregation.Report) -> Pairs:
    """Single sums of a tensor over ranks."""
    return [(row.predicted_s, row.measured_s) for row in report.rows]
