"""A sweep as a table for the screen, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from advisor.inputs.policy import Policy
from advisor.whatif.sweep.points import Sweep, Swept
from profiles.units import format_gib, format_percent, format_seconds

COLUMNS = (
    "swept",
    "value",
    "label",
    "plan",
    "devices",
    "predicted_s",
    "predicted_low_s",
    "predicted_high_s",
    "measured_s",
    "measured_low_s",
    "measured_high_s",
    "measured_steps",
    "peak_high_bytes",
    "fits",
)

# Plans within this margin are equally fast for a decision.
_TIED = Policy().simplicity_margin


def sweep_table(sweep: Sweep) -> RenderableType:
    """Table with a line for each value, and the fastest that fits below. Only the measured range is
    shown if there are two, to fit a page; CSV has both."""
    measured = any(point.measured for point in sweep.points)
    table = Table(box=None, pad_edge=False)
    table.add_column(str(sweep.swept), justify="right", no_wrap=True)
    table.add_column("predicted step", justify="right", no_wrap=True)
    if measured:
        table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("range", justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    for place, point in enumerate(sweep.points):
        row = [_name(sweep, place), format_seconds(point.step_s)]
        timing = point.measured
        if measured:
            row.append(format_seconds(timing.median_s) if timing else "")
        low, high = (timing.low_s, timing.high_s) if timing else (point.low_s, point.high_s)
        row.append(f"{format_seconds(low)} to {format_seconds(high)}")
        row += [format_gib(point.peak_high_bytes), "yes" if point.fits else "no"]
        table.add_row(*map(Text, row))
    head = f"{sweep.model} on {sweep.cluster}, {sweep.global_batch_size} samples a step:"
    if sweep.swept is Swept.BATCH:
        head = f"{sweep.model} on {sweep.cluster}:"
    plans = [Text(), *map(Text, _legend(sweep))] if sweep.swept is Swept.PLAN else []
    return Group(Text(head), *plans, Text(), table, Text(), *map(Text, _notes(sweep)))


def sweep_csv(sweep: Sweep) -> str:
    """Return CSV with a line per value, in seconds and bytes; empty if not measured."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for point in sweep.points:
        timing = point.measured
        seconds = (timing.median_s, timing.low_s, timing.high_s, timing.repeats) if timing else ()
        writer.writerow(
            [
                sweep.swept,
                "" if point.value is None else f"{point.value:g}",
                point.label,
                point.plan,
                point.devices,
                point.step_s,
                point.low_s,
                point.high_s,
                *(seconds or ("",) * 4),
                round(point.peak_high_bytes),
                point.fits,
            ]
        )
    return text.getvalue()


def _legend(sweep: Sweep) -> Iterator[str]:
    """Say what each number stands for, and on how many devices: those of the head may be more."""
    for place, point in enumerate(sweep.points):
        devices = "1 device" if point.devices == 1 else f"{point.devices} devices"
        yield f"{_name(sweep, place)}: {point.label} (on {devices})"


def _name(sweep: Sweep, place: int) -> str:
    """Number of the settings, which are too long for a column."""
    return sweep.points[place].label if sweep.swept is not Swept.PLAN else str(place + 1)


def _notes(sweep: Sweep) -> Iterator[str]:
    best = sweep.best
    if best is None:
        yield "Nothing of it fits."
        return
    by = "measured" if sweep.is_measured else "predicted"
    names = {place: _name(sweep, place) for place in range(len(sweep.points))}
    seconds = [sweep.seconds(point) for point in sweep.points]
    first, last = sweep.points.index(best), seconds.index(max(seconds))
    each = " a sample" if sweep.swept is Swept.BATCH else ""
    sentence = f"Fastest{each}, as {by}: {sweep.swept} {names[first]}"
    if last != first:
        lost = seconds[last] / seconds[first] - 1
        sentence += f"; {names[last]} takes {format_percent(lost)} longer"
    yield sentence
    limit = (1 + _TIED) * seconds[first]
    alike = [
        names[place]
        for place, point in enumerate(sweep.points)
        if place != first and point.fits and seconds[place] <= limit
    ]
    if alike:
        yield f"Equally fast, within {format_percent(_TIED)}: {', '.join(alike)}"
    yield f"Its plan: {best.plan}"
