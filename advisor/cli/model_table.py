"""Model profile as a table: one line per kind of unit, at most 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from profiles.model.profile import GLUE, LOSS, ModelProfile, Numerics, UnitProfile
from profiles.model.times import BlockTimes
from profiles.provenance import Timing
from profiles.units import (
    format_count,
    format_flop_rate,
    format_gib,
    format_percent,
    format_seconds,
)

MOST_LINES = 500
"""Of a table. `rich` lays out three thousand in a second, and nobody reads them."""


def model_table(profile: ModelProfile) -> RenderableType:
    """Table of parameters, FLOP and saved activations of one sample; equal units share a line.

    Notes below explain what is not a module of the model. Of more than `MOST_LINES` lines the rest
    is counted.
    """
    table = Table(box=None, pad_edge=False, show_footer=True)
    table.add_column("unit", "all", overflow="fold")
    table.add_column("kind", overflow="fold")
    numbers = {
        "parameters": format_count(profile.parameters),
        "FLOP": format_count(profile.flop(1)),
        "activations": format_gib(sum(_activation_bytes(unit) for unit in profile.units)),
    }
    for name, total in numbers.items():
        table.add_column(name, total, justify="right", no_wrap=True)
    runs = [list(run) for _, run in groupby(profile.units, key=_signature)]
    for units in runs[:MOST_LINES]:
        table.add_row(
            Text(units[0].name if len(units) == 1 else f"{units[0].name} ... {units[-1].name}"),
            Text(units[0].kind if len(units) == 1 else f"{len(units)} x {units[0].kind}"),
            format_count(sum(unit.parameters for unit in units)),
            format_count(sum(_flop(unit) for unit in units)),
            format_gib(sum(_activation_bytes(unit) for unit in units)),
        )
    notes = [*_more(len(runs) - MOST_LINES, "lines"), *map(Text, _notes(profile))]
    most = MOST_LINES // max(1, len(profile.times))
    times = [part for times in profile.times for part in (Text(), *_times(profile, times, most))]
    return Group(Text(_headline(profile)), Text(), table, Text(), *notes, *times)


def _more(count: int, what: str) -> list[Text]:
    """Say that `count` things are left out, if there are any."""
    return [Text(f"{count:,} more {what}: `--json` has all of them")] if count > 0 else []


def _times(profile: ModelProfile, times: BlockTimes, most: int) -> Iterator[RenderableType]:
    """Measurements: medians, 80 % intervals, and achieved FLOP/s, in at most `most` lines."""
    threads = f", {times.threads} thread{'s' if times.threads > 1 else ''}"
    yield Text(
        f"measured on {times.device} ({times.processor}{threads}), {times.numerics},"
        f" {times.samples} sample{'s' if times.samples > 1 else ''}:"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("unit", overflow="fold")
    for name in ("forward", "backward", "reached"):
        table.add_column(name, justify="right")
    timed = [unit for unit in profile.units if unit.name in times.units]
    runs = [
        (timing, list(run))
        for timing, run in groupby(timed, key=lambda unit: times.units[unit.name])
    ]
    for timing, units in runs[:most]:
        table.add_row(
            Text(units[0].name if len(units) == 1 else f"{units[0].name} ... {units[-1].name}"),
            _spread(timing.forward),
            _spread(timing.backward),
            format_flop_rate(timing.flop_per_s) if timing.flop_per_s else "",
        )
    yield table
    yield from _more(len(runs) - most, "lines")
    for name, reason in list(times.left_out.items())[:most]:
        yield Text(f"{name} is not timed: {reason}")
    yield from _more(len(times.left_out) - most, "units are not timed")


def _spread(timing: Timing) -> str:
    return f"{format_seconds(timing.median_s)} +-{format_percent(timing.relative_error)}"


def _notes(profile: ModelProfile) -> Iterator[str]:
    names = {unit.name for unit in profile.units}
    if GLUE in names:
        yield f"{GLUE}: operations of the model outside all units, as the sum of two embeddings"
    if LOSS in names:
        yield f"{LOSS}: the loss function, and what follows the last unit"
    if profile.tied:
        yield "a weight that several units share is counted in the first of them"
    yield "activations: kept from forward to backward, without temporaries"


def _headline(profile: ModelProfile) -> str:
    tokens = f" of {profile.tokens_per_sample} tokens" if profile.tokens_per_sample else ""
    return (
        f"{profile.name}: {format_count(profile.parameters)} parameters in {profile.dtype}"
        f" ({format_gib(profile.parameter_bytes)})\none sample{tokens}, forward and backward:"
    )


def _signature(unit: UnitProfile) -> tuple[object, ...]:
    return unit.kind, unit.is_block, unit.parameters, _flop(unit), _activation_bytes(unit)


def _flop(unit: UnitProfile) -> float:
    cost = unit.cost(Numerics.AS_BUILT)
    return cost.forward_flop.at(1) + cost.backward_flop.at(1)


def _activation_bytes(unit: UnitProfile) -> float:
    return unit.cost(Numerics.AS_BUILT).activation_bytes.at(1)
