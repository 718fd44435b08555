"""Tables of the comparison, as a person reads them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from profiles.units import format_seconds
from tests.peers.results import BOUND, LOSSY_BOUND, Answer, Entry, Peers, Race, lead
from tests.peers.scripts import LOSSY, OURS, OURS_FASTEST, OURS_LOSSY

MIB = 2**20
LEAST, LEAST_SLOW, SLOW = 1.0, 1.5, "100 Mbit/s"
"""Marks: of our throughput over theirs on every link, and on the slow one."""
CALCULON = (
    "Calculon was not asked: the index's package of that name (1.1, 2013) is a queue of producers"
    " and consumers, not the co-design tool."
)


def tables(peers: Peers) -> str:
    """Everything, with the marks that were missed."""
    parts = [_head(peers), *map(_race, peers.races), _marks(peers), _capacities(peers)]
    return "\n\n".join(part for part in [*parts, _answers(peers)] if part)


def _head(peers: Peers) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in peers.versions.items())
    return (
        f"{peers.measured_at}, {peers.machine}; {versions}\n"
        f"Equal work: every step's loss within {BOUND:g} of one process, {LOSSY_BOUND:g} where"
        " gradients are rounded (*)."
    )


def _race(race: Race) -> str:
    lines = [
        f"{race.subject}, {race.parameters / 1e6:.2f} M parameters, {race.rows} rows, {race.link}",
        f"  {'':33}{'rows/s':>8}{'ours/theirs':>13}{'(quartiles)':>14}{'loss':>9}{'peak MiB':>10}",
    ]
    for entry in race.entries:
        name = f"{entry.script}{'*' if entry.is_lossy else ''}"
        if entry.left_out:
            lines.append(f"  {name:33} left out: {entry.left_out[:110]}")
            continue
        ours = rival_of(race, entry)
        shown, spread = "", ""
        if ours is not None and ours is not entry and entry.counts:
            middle, low, high = lead(ours, entry)
            shown, spread = f"{middle:.2f}", f"{low:.2f}-{high:.2f}"
        error = "?" if entry.loss_error is None else f"{entry.loss_error:.0e}"
        wrong = "" if entry.works_equally else "  other work"
        lines.append(
            f"  {name:33}{race.rows_per_s(entry):>8.1f}{shown:>13}{spread:>14}{error:>9}"
            f"{entry.peak_bytes / MIB:>10.1f}{wrong}  {entry.plan}".rstrip()
        )
    return "\n".join(lines)


def rival_of(race: Race, entry: Entry) -> Entry | None:
    """Our run that an entry is compared with: a lossy one with ours that may be, else the default.

    Where that took the plan of another of ours, it is that.
    """
    if entry.script in (OURS_FASTEST, OURS_LOSSY):
        return race.entry(OURS)
    wanted = [OURS_LOSSY, OURS] if entry.script in LOSSY else [OURS]
    runs = (race.entry(name) for name in wanted)
    return next((run for run in runs if run is not None and run.counts), None)


def missed(race: Race) -> Iterator[tuple[Entry, float, float]]:
    """Peers whose lead over ours or distance misses the mark: entry, ratio, mark."""
    for entry in race.entries:
        ours = rival_of(race, entry)
        if entry.script.startswith(OURS) or not entry.counts or ours is None:
            continue
        least = LEAST_SLOW if race.link == SLOW and entry.script not in LOSSY else LEAST
        ratio = lead(ours, entry)[0]
        if ratio < least:
            yield entry, ratio, least


def _marks(peers: Peers) -> str:
    ratios: dict[str, list[float]] = {}
    lines = []
    for race in peers.races:
        for entry in race.entries:
            ours = rival_of(race, entry)
            if entry.counts and ours is not None and not entry.script.startswith(OURS):
                ratios.setdefault(race.link, []).append(lead(ours, entry)[0])
        lines += [
            f"  {race.subject}, {race.link}: {ratio:.2f} of {entry.script}, the mark is {least}"
            for entry, ratio, least in missed(race)
        ]
    head = [
        f"ours/theirs on {link}: median {statistics.median(values):.2f}, least {min(values):.2f},"
        f" of {len(values)}"
        for link, values in ratios.items()
    ]
    return "\n".join([*head, *(["marks missed:", *lines] if lines else [])])


def _capacities(peers: Peers) -> str:
    if not peers.capacities:
        return ""
    first = peers.capacities[0]
    limit = max(one.limit_bytes for one in peers.capacities)
    lines = [f"the deepest {first.subject} in {limit / MIB:.0f} MiB of tensors a rank, local ranks"]
    for one in sorted(peers.capacities, key=lambda c: -c.depth):
        if one.left_out:
            lines.append(f"  {one.script:33} left out: {one.left_out[:110]}")
            continue
        lines.append(
            f"  {one.script:33}{one.depth:>4} blocks{one.parameters / 1e6:>7.2f} M"
            f"{one.peak_bytes / MIB:>7.1f} MiB  {one.plan}".rstrip()
        )
    return "\n".join(lines)


def _answers(peers: Peers) -> str:
    if not peers.answers:
        return ""
    lines = [
        "planners, on the runs above: median and largest |predicted / measured - 1|",
        f"  {'':30}{'of':24}{'answer':>9}{'peak':>16}{'step':>16}",
    ]
    by_planner: dict[tuple[str, str], list[Answer]] = {}
    for answer in peers.answers:
        by_planner.setdefault((answer.planner, answer.script), []).append(answer)
    for (planner, script), group in by_planner.items():
        seconds = format_seconds(statistics.median(one.answer_s for one in group))
        peaks, steps = errors(peers, group)
        notes = dict.fromkeys(one.note for one in group if one.note and planner != "ours")
        lines.append(
            f"  {planner:30}{script or '-':24}{seconds:>9}{_error(peaks):>16}{_error(steps):>16}"
            f"  {'; '.join(notes)[:120]}".rstrip()
        )
    return "\n".join([*lines, f"  {CALCULON}"])


def errors(peers: Peers, group: list[Answer]) -> tuple[list[float], list[float]]:
    """Relative errors of peaks and of steps against the races; positive: predicted too much."""
    peaks, steps = [], []
    for one in group:
        race = peers.race(one.subject, one.link)
        entry = race.entry(one.script) if race else None
        if race is None or entry is None or not entry.turns_s:
            continue
        if one.peak_bytes is not None and entry.peak_bytes:
            peaks.append(one.peak_bytes / entry.peak_bytes - 1)
        if one.step_s is not None:
            steps.append(one.step_s * race.steps / statistics.median(entry.turns_s) - 1)
    return peaks, steps


def _error(values: list[float]) -> str:
    if not values:
        return "-"
    worst = max(values, key=abs)
    return f"{statistics.median(map(abs, values)):.0%}, {worst:+.0%}"
