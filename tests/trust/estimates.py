"""Claims that what is predicted is what comes: here, on links, on published runs, on a GPU."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from profiles.units import format_bandwidth, format_seconds
from tests.benchmarks import aggregation, updates
from tests.gpu.results import RESULTS as GPU
from tests.gpu.results import UNSEEN, CaseResult, Results
from tests.gpu.results import Row as Measured
from tests.peers import results as peer_results
from tests.peers.results import Peers
from tests.peers.table import errors as peer_errors
from tests.regret.report import REPORT as REGRET
from tests.regret.report import Report
from tests.scorecard.score import headline
from tests.scorecard.table import NESTED
from tests.trust import runs
from tests.trust.claim import Answer, Claim, errors, listed, off, percent
from tests.validation import shaped_links, splits

SCORECARD = NESTED.with_name("scorecard.json")


def _on_gpu(results: Results) -> Answer | None:
    rows = [(case, row) for case in results.cases for row in case.rows]
    bounded = [row for _, row in rows if row.limit is not None]
    if not rows:
        return None
    exact = sum(not row.is_beyond for row in bounded)
    return Answer(
        f"{results.device}: {exact} of {len(bounded)} results within their bounds of the CPU's;"
        f" {_steps_and_peaks(results)}",
        _worst_of(results),
    )


def _unseen(results: Results) -> Answer | None:
    """Of a device and of models on which nothing was calibrated."""
    if not results.cases:
        return None
    return Answer(
        f"{results.device}, predicted before it ran: {_steps_and_peaks(results)}",
        _worst_of(results),
    )


def _steps_and_peaks(results: Results) -> str:
    steps = [row for _, row in _steps(results)]
    terms = ("allocated", "peak")
    peaks = [row for case in results.cases for row in case.rows if row.term in terms]
    shown = [
        f"{name} {off(errors(pairs))}"
        for name, pairs in (
            (f"{len(steps)} steps from a bench", _pairs(steps, "from_bench")),
            ("from its data sheet", _pairs(steps, "from_sheet")),
            (f"{len(peaks)} peaks of tensors", _pairs(peaks, "from_sheet")),
        )
        if pairs
    ]
    return listed(shown, most=6, none="no step yet")


def _steps(results: Results) -> list[tuple[CaseResult, Measured]]:
    rows = ((case, row) for case in results.of_part("c") for row in case.rows)
    return [(case, row) for case, row in rows if row.term == "step"]


def _pairs(rows: Sequence[Measured], source: str) -> list[tuple[float, float]]:
    """Predicted from there, and measured."""
    predicted = ((getattr(row, source), row.measured) for row in rows)
    return [(value, measured) for value, measured in predicted if value is not None]


def _worst_of(results: Results) -> str:
    """The step that is predicted worst, and cases that went wrong."""
    ended: dict[str, list[str]] = defaultdict(list)
    for case in results.cases:
        ended[case.outcome].append(case.name)
    words = [
        f"{len(ended[name])} {name} ({listed(ended[name])})"
        for name in ("differed", "failed", "left out")
        if ended[name]
    ]
    known = [(case, row) for case, row in _steps(results) if row.from_bench is not None]
    if known:
        case, row = max(known, key=lambda each: errors(_pairs([each[1]], "from_bench"))[0])
        assert row.from_bench is not None
        words.append(
            f"the worst step, {case.name}: predicted {format_seconds(row.from_bench)}, took"
            f" {format_seconds(row.measured)}"
        )
    return "; ".join(words) or "no case differed or failed"


def _plans(report: Report) -> Answer | None:
    if not (times := runs.plan_times(report)):
        return None
    time_errors = errors(times)
    rows = [(result, row) for result in report.results for row in result.rows]
    above = [(c, r) for c, r in rows if r.peak_bytes > r.predicted_high_bytes]
    case, row = max(rows, key=lambda each: abs(each[1].predicted_s / each[1].step_s - 1))
    return Answer(
        f"{len(times)} plans run here, from a bench on the spot: step {off(time_errors)};"
        f" peak of tensors {off(errors(runs.plan_peaks(report)))}",
        f"the worst step, in {case.name}: predicted {format_seconds(row.predicted_s)}, took"
        f" {format_seconds(row.step_s)}; {len(above)} peaks above the predicted range",
    )


def _splits(report: splits.Report) -> Answer:
    points = (*report.plans.points, *report.sizes.points)
    known = [(point, point.measured.median_s) for point in points if point.measured]
    inside = sum(point.low_s <= took_s <= point.high_s for point, took_s in known)
    worst, worst_s = max(known, key=lambda each: abs(each[0].step_s / each[1] - 1))
    return Answer(
        f"{len(known)} steps of ResNet-50 as a pipeline of two ranks and in one piece:"
        f" {off(errors(runs.split_times(report)))}; {inside} of {len(known)} in the predicted"
        " range",
        f"`{worst.plan}`: predicted {format_seconds(worst.step_s)}, took {format_seconds(worst_s)}",
    )


def _updates(report: updates.Report) -> Answer:
    inside = sum(row.is_in_range for row in report.rows)
    worst = max(report.rows, key=lambda row: abs(row.predicted_s / row.step_s - 1))
    return Answer(
        f"{len(report.rows)} steps of local SGD, DiLoCo and parameter servers, half of them with a"
        f" straggler, at {_line(report.line_bytes_per_s)}:"
        f" {off(errors(runs.update_times(report)))}; {inside} of {len(report.rows)} in the"
        " predicted range",
        f"`{worst.plan}`: predicted {format_seconds(worst.predicted_s)}, took"
        f" {format_seconds(worst.step_s)}",
    )


def _sums(report: aggregation.Report) -> Answer:
    inside = [
        row
        for row in report.rows
        if abs(row.measured_s / row.predicted_s - 1) <= row.predicted_error
    ]
    worst = max(report.rows, key=lambda row: abs(row.predicted_s / row.measured_s - 1))
    return Answer(
        f"{len(report.rows)} sums over 2 to 4 ranks at {_line(report.line_bytes_per_s)}, from one"
        f" latency and one rate: {off(errors(runs.sum_times(report)))}; {len(inside)} of"
        f" {len(report.rows)} in the predicted range",
        f"{worst.kind} on {worst.ranks} ranks, {worst.tensor_bytes / 2**20:.2g} MiB: predicted"
        f" {format_seconds(worst.predicted_s)}, took {format_seconds(worst.measured_s)}",
    )


def _links(report: shaped_links.Report) -> Answer:
    shown = [
        f"{_line(row.line_bytes_per_s)}: {row.inter_bytes_per_s / row.line_bytes_per_s:.0%} of it"
        f" benched, judged {row.verdict}"
        for row in report.rows
        if row.line_bytes_per_s
    ]
    wide = max(report.rows, key=lambda r: r.intra_high_bytes_per_s / r.intra_low_bytes_per_s)
    return Answer(
        "; ".join(shown),
        "inside a node nothing is known better than"
        f" {format_bandwidth(wide.intra_low_bytes_per_s)} to"
        f" {format_bandwidth(wide.intra_high_bytes_per_s)}",
    )


def _line(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8e-6:,.0f} Mbit/s"


def _planners(peers: Peers) -> Answer | None:
    groups = defaultdict(list)
    for answer in peers.answers:
        groups[answer.planner].append(answer)
    ours = groups.pop(runs.OURS, [])
    peaks, steps = peer_errors(peers, ours)
    if not (peaks and steps):
        return None
    peak, step = median(map(abs, peaks)), median(map(abs, steps))
    others, better = [], []
    for name, group in groups.items():
        for what, own, ours_off in zip(
            ("peak", "step"), peer_errors(peers, group), (peak, step), strict=True
        ):
            if own:
                theirs = median(map(abs, own))
                others.append(f"{name}: {what} {percent(theirs)}")
                better += [f"{name}: {what}"] if theirs < ours_off else []
    seconds = format_seconds(median(one.answer_s for one in ours))
    return Answer(
        f"of {len(ours)} runs of the peers, in {seconds} each: peak"
        f" {off([abs(e) for e in peaks])}, step {off([abs(e) for e in steps])}; others at the"
        f" median: {listed(others, most=8)}",
        f"nearer than ours: {listed(better, most=8)}",
    )


def _published(card: Mapping[str, Any]) -> Answer:
    """Each publisher by constants that were fitted without it."""
    return _of_card(card["left out"], "of others' runs, their publisher left out of the fit")


def _nested(run: Mapping[str, Any]) -> Answer:
    words = f"from {len(run['drawn'])} publishers, out of view while anything was chosen"
    return _of_card(run["card"], words)


def _of_card(card: Mapping[str, Any], words: str) -> Answer:
    parts = ("time", "memory", "choice", "failures")
    time, memory, choice, failures = (headline(card["all"], part) or {} for part in parts)
    worst = sorted(_medians(card), reverse=True)[:2]
    return Answer(
        f"{time['rows']:,} steps {words}: off by {percent(time['median'])} at the median,"
        f" {percent(time['p90'])} in 9 of 10; {memory['rows']} peaks: {percent(memory['median'])}"
        f" and {percent(memory['p90'])}; the layout chosen of {choice['groups']} groups takes"
        f" {percent(choice['regret'])} longer than the best",
        f"{1 - time['covered']:.0%} of steps and {1 - memory['covered']:.0%} of peaks out of the"
        f" predicted range; {' and '.join(f'{percent(one)} on {name}' for one, name in worst)} at"
        f" the median; layouts' rank correlation {choice['correlation']:.2f};"
        f" {failures['failed']} runs out of memory: recall {percent(failures['recall'] or 0.0)},"
        f" precision {percent(failures['precision'] or 0.0)}",
    )


def _medians(card: Mapping[str, Any]) -> Iterator[tuple[float, str]]:
    for name, scores in card["files"].items():
        if (time := headline(scores, "time")) is not None:
            yield time["median"], name.replace("_", " ")


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


CLAIMS = (
    Claim(
        "Are its numbers right, on a GPU?", "make gpu", GPU, Results.load, _on_gpu,
        lacking="not run on a GPU yet",
    ),
    Claim("... of models and of a GPU that were new?", "make gpu", UNSEEN, Results.load, _unseen),
    Claim("... on CPU ranks here?", "make regret", REGRET, Report.load, _plans),
    Claim(
        "... of pipelines?", "python -m tests.validation.splits", splits.REPORT,
        splits.Report.load, _splits,
    ),
    Claim(
        "... of updates apart?", "python -m tests.benchmarks.updates", updates.REPORT,
        updates.Report.load, _updates,
    ),
    Claim(
        "... of messages?", "python -m tests.benchmarks.aggregation", aggregation.REPORT,
        aggregation.Report.load, _sums,
    ),
    Claim(
        "... of links?", "python -m tests.validation.shaped_links", shaped_links.REPORT,
        shaped_links.Report.load, _links,
    ),
    Claim(
        "... beside other planners?", "make peers", peer_results.RESULTS, Peers.load, _planners,
    ),
    Claim("... of published runs?", "make scorecard", SCORECARD, _json, _published),
    Claim("... never seen before?", "make scorecard-nested", NESTED, _json, _nested),
)  # fmt: skip
