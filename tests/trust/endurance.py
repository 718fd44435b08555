"""Claims that it lasts: kills, crashes, hostile files, long lives, and growth."""

from __future__ import annotations

from engines.plan import Plan
from tests.benchmarks.async_save import INTERVAL
from tests.benchmarks.async_save import REPORT as SAVES
from tests.benchmarks.async_save import Report as SaveReport
from tests.benchmarks.growth.__main__ import missed
from tests.benchmarks.growth.curves import CURVES
from tests.benchmarks.growth.results import REPORT as GROWTH
from tests.benchmarks.growth.results import Report as GrowthReport
from tests.benchmarks.growth.results import exponent
from tests.benchmarks.planning_time import HELP, PROCESSES
from tests.fuzz.runner import REPORT as FUZZ
from tests.fuzz.runner import Report as FuzzReport
from tests.soak.faults import RAISING, faults_of
from tests.soak.report import REPORT as SOAK
from tests.soak.report import Report as SoakReport
from tests.soak.training import PLANS
from tests.soak.waits import LONGEST_S, RAISED_S
from tests.trust.claim import Answer, Claim, listed, percent


def _kills(soak: SoakReport) -> Answer | None:
    if not soak.trainings:
        return None
    kills = sum(sum(training.kills.values()) for training in soak.trainings)
    plans = ", ".join(f"`{training.plan}`" for training in soak.trainings)
    wrong = [each.name for each in soak.trainings if each.differences]
    repeated = sum(each.repeated_steps for each in soak.trainings)
    steps = sum(each.steps for each in soak.trainings)
    return Answer(
        f"{kills} kills of ranks and launchers, also during saves and starts ({plans}):"
        f" {len(soak.trainings) - len(wrong)} of {len(soak.trainings)} trainings end bit for bit"
        " like one left alone",
        f"other bits: {listed(wrong)}; {repeated} of {steps:,} steps were done twice",
    )


def _crashes(soak: SoakReport) -> Answer | None:
    if not soak.crash_points:
        return None
    points = soak.crash_points
    wrong = [text for each in points for text in each.differences]
    return Answer(
        f"saves broken off at each of {sum(sum(each.points) for each in points)} file events:"
        f" {sum(each.old for each in points)} loads give the old state,"
        f" {sum(each.new for each in points)} the new one",
        f"lost or mixed states: {listed(wrong)}",
    )


def _pairs(soak: SoakReport) -> Answer | None:
    if not soak.pairs:
        return None
    pairs = soak.pairs
    plans = {pair.saved_plan for pair in pairs}
    ranks = [Plan.parse(plan).world_size for plan in plans]
    same = sum(not (pair.weights or pair.states) for pair in pairs)
    worst = max(pairs, key=lambda pair: pair.losses)
    wrong = [text for pair in pairs for text in pair.differences]
    return Answer(
        f"{len(pairs)} pairs of {len(plans)} plans of {min(ranks)} to {max(ranks)} ranks: {same}"
        " loads give the weights and the optimizer's states that were saved, bit for bit; losses of"
        f" the next {worst.steps} steps are the undisturbed training's within {worst.losses:.1g}",
        f"other states or losses: {listed(wrong)}; losses differ most of `{worst.saved_plan}`"
        f" loaded under `{worst.loaded_plan}`",
    )


def _waits(soak: SoakReport) -> Answer | None:
    if not soak.waits:
        return None
    waits = soak.waits
    plans = {each.name for each in waits}
    faults = ", ".join(dict.fromkeys(each.fault for each in waits))
    left = sum(len(faults_of(name)) for name in PLANS) - len(waits)
    longest = max(waits, key=lambda each: each.seconds)
    raised = [each.seconds for each in waits if each.fault in RAISING]
    wrong = [text for each in waits for text in each.differences]
    return Answer(
        f"{len(waits)} faults of one rank ({faults}) under {len(plans)} plans: all others end"
        f" within {longest.seconds:.0f} s, where the rank itself raises within"
        f" {max(raised, default=0.0):.1f} s; {sum(each.named for each in waits)} of {len(waits)}"
        " name the rank",
        f"later than {LONGEST_S:.0f} s and {RAISED_S:.0f} s, or no rank named: {listed(wrong)}; the"
        f" longest is `{longest.plan}`, {longest.fault}"
        + f"; {left} not measured yet"
        * (left > 0),
    )


def _long(soak: SoakReport) -> Answer | None:
    if not soak.repeated:
        return None
    shown = [
        f"{each.count:,} {each.name}: {each.last_mib - each.first_mib:+.1f} MiB"
        for each in soak.repeated
    ]
    wrong = [text for each in soak.repeated for text in each.differences]
    return Answer("; ".join(shown), f"growth beyond its bound: {listed(wrong)}")


def _fuzzed(fuzz: FuzzReport) -> Answer:
    findings = [
        f"{count} {what} ({each.reader})" if count > 1 else f"{what} ({each.reader})"
        for each in fuzz.results
        for what, count in each.findings.items()
    ]
    slowest = max(each.slowest_s for each in fuzz.results)
    return Answer(
        f"{sum(each.cases for each in fuzz.results):,} broken inputs to {len(fuzz.results)}"
        f" readers: {sum(each.accepted for each in fuzz.results):,} read,"
        f" {sum(each.refused for each in fuzz.results):,} refused by name, the slowest in"
        f" {slowest:.1f} s",
        f"neither: {listed(findings)}",
    )


def _saves(saves: SaveReport) -> Answer:
    rows = saves.rows
    worst = max(rows, key=lambda row: max(row.stalls))
    return Answer(
        f"a save in the background every {INTERVAL} steps makes them"
        f" {' and '.join(percent(row.stall) for row in rows)} longer"
        f" ({' and '.join(f'`{row.plan}`' for row in rows)}, {rows[0].saved_mib:.0f} MiB)",
        f"{percent(max(worst.stalls))} in the worst of {len(worst.stalls)} rounds of"
        f" `{worst.plan}`",
    )


def _growth(report: GrowthReport) -> Answer | None:
    shown = []
    for curve in CURVES:
        points = [point for point in report.of(curve.key) if not point.left_out]
        if curve.name != "decide" or not points:
            continue
        slope = exponent(points, "cpu_s")
        grows = f" (power {slope:.2f})" if slope is not None else ""
        shown.append(
            f"{_figure(points[0].cpu_s)} to {_figure(points[-1].cpu_s)} s for {curve.against}"
            f" {points[0].at:,.0f} to {points[-1].at:,.0f}{grows}"
        )
    whole = [p for process in PROCESSES if process.name != HELP for p in report.of(process.name)]
    seconds = [point.seconds for point in whole if not point.left_out]
    if seconds:
        shown.append(
            f"`advise` on {len(seconds)} known models: {min(seconds):.1f} to {max(seconds):.1f} s"
        )
    if not shown:
        return None
    lines = [line.removeprefix("missed: ") for line in missed(report)]
    return Answer(f"a decision takes {'; '.join(shown)}", f"marks missed: {listed(lines)}")


def _figure(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.2g}"


CLAIMS = (
    Claim("Does it survive kills?", "make soak", SOAK, SoakReport.load, _kills),
    Claim(
        "... crashes during saves?",
        'make soak SOAK="--crash-points"',
        SOAK,
        SoakReport.load,
        _crashes,
    ),
    Claim("... a long life?", 'make soak SOAK="--load"', SOAK, SoakReport.load, _long),
    Claim("... broken files?", "make fuzz", FUZZ, FuzzReport.load, _fuzzed),
    Claim(
        "Can another plan go on?",
        'make soak SOAK="--pairs"',
        SOAK,
        SoakReport.load,
        _pairs,
    ),
    Claim("Does it hang?", 'make soak SOAK="--waits"', SOAK, SoakReport.load, _waits),
    Claim(
        "Do saves stall it?",
        "python -m tests.benchmarks.async_save",
        SAVES,
        SaveReport.load,
        _saves,
    ),
    Claim("Does planning scale?", "make growth", GROWTH, GrowthReport.load, _growth),
)
