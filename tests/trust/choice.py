"""Claims that the plan that is chosen is the best one, and better than what people use today."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from statistics import median

from advisor.decide.tree import LEAVES
from tests.benchmarks.less_to_send import REPORT as LESS
from tests.benchmarks.less_to_send import Report as LessReport
from tests.peers.results import RESULTS as PEERS
from tests.peers.results import Entry, Peers, Race, lead
from tests.peers.scripts import OURS
from tests.peers.table import rival_of
from tests.regret.cases import CASES
from tests.regret.report import REPORT as REGRET
from tests.regret.report import WORST_REGRET, Report, Result
from tests.trust.claim import Answer, Claim, listed, percent, spread


def _regret(report: Report) -> Answer | None:
    results = [result for result in report.results if result.rows]
    if not results:
        return None
    run, legal = sum(len(r.rows) for r in results), sum(r.legal for r in results)
    known = [result for result in results if math.isfinite(result.regret)]
    regrets = [result.regret for result in known] or [math.inf]
    ranks = [result.correlation for result in results]
    worst = sorted(known, key=lambda r: (-(r.regret - r.noise), r.name))
    beyond = [each for each in worst if each.regret - each.noise > WORST_REGRET] or worst[:1]
    failed = [result.name for result in results if result not in known]
    return Answer(
        f"{len(results)} of {len(CASES)} cases, {run:,} of {legal:,} legal plans run: the chosen"
        f" one takes {spread(regrets, percent)} longer than the best of them; two runs of one plan"
        f" differ by {percent(median(r.noise for r in results))}; predicted and measured order"
        f" agree by a rank correlation of {spread(ranks, '{:.2f}'.format)}",
        f"worst: {listed([_case(each) for each in beyond])}; picks that failed: {listed(failed)};"
        f" cases that could not be run: {listed(list(report.broken))}",
    )


def _case(result: Result) -> str:
    return f"{percent(result.regret)} (noise {percent(result.noise)}) in {result.name}"


def _tree(report: Report) -> Answer | None:
    results = [result for result in report.results if result.rows and result.fitting]
    if not results:
        return None
    right = [result for result in results if result.is_right]
    wrong = [result.name for result in results if not result.is_right]
    other = [result.name for result in results if not result.agrees]
    reached = len({result.leaf for result in results})
    return Answer(
        f"{reached} of {len(LEAVES)} leaves reached; in {len(right)} of {len(results)} cases the"
        " leaf's plans are the fastest, or the report said beforehand that another is",
        f"not in: {listed(wrong)}; the documents' order is not the clock's in: {listed(other)}",
    )


def leads(peers: Peers) -> Iterator[tuple[Race, Entry, float]]:
    """Every peer that did the same work, and our throughput over its."""
    for race in peers.races:
        for entry in race.entries:
            ours = rival_of(race, entry)
            if entry.counts and ours is not None and not entry.script.startswith(OURS):
                yield race, entry, lead(ours, entry)[0]


def _throughput(peers: Peers) -> Answer | None:
    by_link: dict[str, list[float]] = defaultdict(list)
    lost = []
    for race, entry, ratio in leads(peers):
        by_link[race.link].append(ratio)
        if ratio < 1:
            lost.append((ratio, f"{ratio:.2f}x of {entry.script} on {race.subject}, {race.link}"))
    if not by_link:
        return None
    every = [entry for race in peers.races for entry in race.entries]
    aside = (
        sum(bool(e.left_out) for e in every),
        sum(not e.left_out and not e.counts for e in every),
    )
    shown = "; ".join(
        f"{link}: {spread(values, '{:.2f}x'.format)} of {len(values)} runs"
        for link, values in by_link.items()
    )
    scripts = len({entry.script for _, entry, _ in leads(peers)})
    return Answer(
        f"our samples/s over theirs at equal losses, {scripts} ways of plain torch, Accelerate,"
        f" DeepSpeed, Transformers: {shown}",
        f"slower in {len(lost)}: {listed([text for _, text in sorted(lost)])}; not compared:"
        f" {aside[0]} that do not run here, {aside[1]} with other losses",
    )


def _capacity(peers: Peers) -> Answer | None:
    known = [one for one in peers.capacities if not one.left_out]
    ours = next((one for one in known if one.script == OURS), None)
    others = [one for one in known if not one.script.startswith(OURS)]
    if ours is None or not others:
        return None
    more = [f"{one.script}: {one.depth}" for one in others if one.depth > ours.depth]
    return Answer(
        f"{ours.depth} blocks of {ours.subject} ({ours.parameters / 1e6:.1f} M parameters) in"
        f" {ours.limit_bytes / 2**20:.0f} MiB of tensors a rank; others"
        f" {min(one.depth for one in others)} to {max(one.depth for one in others)} blocks",
        f"more blocks than ours: {listed(more)}",
    )


def _less(report: LessReport) -> Answer:
    chosen, plain = report.chosen, report.plain
    other = abs(chosen.last_loss / plain.last_loss - 1)
    best = min(report.rows, key=lambda row: row.step_s)
    words = chosen.plan.replace(" microbatch_size=2", "")
    return Answer(
        f"`{words}` was chosen of {len(report.rows)} at"
        f" {report.line_bytes_per_s * 8e-6:.0f} Mbit/s: {plain.step_s / chosen.step_s:.1f}x the"
        f" speed of plain DDP, its loss {percent(other)} off after {len(chosen.losses)} steps",
        "the fastest of them"
        if best is chosen
        else f"{percent(chosen.step_s / best.step_s - 1)} slower than `{best.plan}`",
    )


CLAIMS = (
    Claim("Is the chosen plan the best one?", "make regret", REGRET, Report.load, _regret),
    Claim("... and is the tree's advice?", "make regret", REGRET, Report.load, _tree),
    Claim("Is it faster than what I use?", "make peers", PEERS, Peers.load, _throughput),
    Claim("Does it fit larger models?", "make peers", PEERS, Peers.load, _capacity),
    Claim(
        "Does it help on slow links (`--allow-lossy`)?",
        "python -m tests.benchmarks.less_to_send",
        LESS,
        LessReport.load,
        _less,
    ),
)
