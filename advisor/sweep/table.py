"""A sweep as a table for the screen, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from advisor.policy import Policy
from advisor.sweep.points import Point, Sweep, Swept
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

# As plans are equally fast for a decision.
_TIED = Policy().simplicity_margin


def sweep_table(sweep: Sweep) -> RenderableType:
    """A line for each value; the fastest that fits is said below."""
    measured = any(point.measured for point in sweep.points)
    table = Table(box=None, pad_edge=False)
    justify: Literal["right", "left"] = "right" if sweep.swept.is_number else "left"
    table.add_column(str(sweep.swept), overflow="fold", justify=justify)
    table.add_column("predicted step", justify="right", no_wrap=True)
    table.add_column("range", justify="right", no_wrap=True)
    if measured:
        table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    for point in sweep.points:
        row = [point.label, format_seconds(point.step_s), _range(point.low_s, point.high_s)]
        if measured:
            row.append(_measured(point))
        row += [format_gib(point.peak_high_bytes), "yes" if point.fits else "no"]
        table.add_row(*map(Text, row))
    head = f"{sweep.model} on {sweep.cluster}, {sweep.global_batch_size} samples a step:"
    if sweep.swept is Swept.BATCH:
        head = f"{sweep.model} on {sweep.cluster}:"
    return Group(Text(head), Text(), table, Text(), *map(Text, _notes(sweep)))


def sweep_csv(sweep: Sweep) -> str:
    """A header and a line for each value; seconds and bytes, empty where nothing was measured."""
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


def _notes(sweep: Sweep) -> Iterator[str]:
    best = sweep.best
    if best is None:
        yield "Nothing of it fits."
        return
    by = "measured" if best.measured else "predicted"
    slowest = max(sweep.points, key=lambda point: _seconds(point, best))
    lost = _seconds(slowest, best) / _seconds(best, best) - 1
    sentence = f"Fastest, as {by}: {sweep.swept} {best.label}"
    if slowest is not best:
        sentence += f"; {slowest.label} takes {format_percent(lost)} longer"
    yield sentence
    alike = [p.label for p in sweep.points if p is not best and p.fits and _is_tied(p, best)]
    if alike:
        yield f"Equally fast, within {format_percent(_TIED)}: {', '.join(alike)}"
    yield f"Its plan: {best.plan}"


def _is_tied(point: Point, best: Point) -> bool:
    return _seconds(point, best) <= (1 + _TIED) * _seconds(best, best)


def _seconds(point: Point, best: Point) -> float:
    """Of the kind that the best was found by."""
    return point.measured.median_s if best.measured and point.measured else point.step_s


def _measured(point: Point) -> str:
    timing = point.measured
    if timing is None:
        return ""
    return f"{format_seconds(timing.median_s)} ({_range(timing.low_s, timing.high_s)})"


def _range(low: float, high: float) -> str:
    return f"{format_seconds(low)} to {format_seconds(high)}"
