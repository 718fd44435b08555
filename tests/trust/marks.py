"""Marks of the picture: every run that was predicted, and how our choices did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks import aggregation, less_to_send, updates
from tests.peers.results import RESULTS as PEERS
from tests.peers.results import Peers
from tests.regret.report import REPORT as REGRET
from tests.regret.report import Report
from tests.trust import runs
from tests.trust.choice import leads
from tests.trust.claim import Files
from tests.validation import splits

Kind = tuple[str, Path, Callable[[Path], Any], Callable[[Any], runs.Pairs]]
"""Name, report, how it is read, and its runs."""

TIMES: tuple[Kind, ...] = (
    ("plans of make regret", REGRET, Report.load, runs.plan_times),
    ("runs of make peers", PEERS, Peers.load, runs.peer_times),
    ("ResNet-50 in two stages", splits.REPORT, splits.Report.load, runs.split_times),
    ("updates apart, 100 Mbit/s", updates.REPORT, updates.Report.load, runs.update_times),
    ("less to send, 100 Mbit/s", less_to_send.REPORT, less_to_send.Report.load, runs.lean_times),
    ("sums over ranks, 100 Mbit/s", aggregation.REPORT, aggregation.Report.load, runs.sum_times),
)
PEAKS: tuple[Kind, ...] = (
    ("plans of make regret", REGRET, Report.load, runs.plan_peaks),
    ("runs of make peers", PEERS, Peers.load, runs.peer_peaks),
)


@dataclass(frozen=True)
class Ratio:
    """A ratio with what it may be by chance.

    Attributes:
        row: that it is shown in.
        kind: of one colour.
    """

    row: str
    value: float
    noise: float = 0.0
    kind: str = ""


def step_times(files: Files) -> dict[str, runs.Pairs]:
    """Seconds, by the kind of run."""
    return _known(files, TIMES)


def peaks(files: Files) -> dict[str, runs.Pairs]:
    """Most bytes of tensors on a rank in a step, by the kind of run."""
    return _known(files, PEAKS)


def regrets(files: Files) -> list[Ratio]:
    """The chosen plan's time over the best one's, by case; infinite where it failed."""
    report = files.read(REGRET, Report.load)
    results = report.results if report else ()
    return [Ratio(each.name, 1 + each.regret, each.noise) for each in results if each.rows]


def throughputs(files: Files) -> list[Ratio]:
    """Our throughput over each peer's, by peer; kinds are links."""
    peers = files.read(PEERS, Peers.load)
    if peers is None:
        return []
    return [Ratio(entry.script, ratio, kind=race.link) for race, entry, ratio in leads(peers)]


def _known(files: Files, kinds: Sequence[Kind]) -> dict[str, runs.Pairs]:
    results = {}
    for name, path, load, pairs in kinds:
        report = files.read(path, load)
        if report is not None and (known := pairs(report)):
            results[name] = known
    return results
