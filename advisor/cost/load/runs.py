"""Runs of equal consecutive units, costed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from profiles.model.profile import ModelProfile, UnitProfile


@dataclass(frozen=True, slots=True)
class UnitRun:
    """Units [first, first + count) of a model, equal but for names and positions."""

    unit: UnitProfile
    first: int
    count: int

    @property
    def last(self) -> int:
        """Index after the run."""
        return self.first + self.count


def runs_of(model: ModelProfile) -> tuple[UnitRun, ...]:
    """Units of `model` in order, equal neighbors combined.

    Units whose measured times differ are different; so are those that FSDP treats differently, and
    those with other code before them.
    """
    separate = {unit.name for unit in model.shard_units()}
    late = model.reduced_at_end
    timed = [times.units for times in model.times]
    runs: list[UnitRun] = []
    previous: tuple[object, ...] | None = None
    for place, unit in enumerate(model.units):
        name = unit.name
        key = (
            name in separate,
            name in late,
            [units.get(name) for units in timed],
            [before.get(name) for before in model.glue.values()],
        )
        if previous == key and _alike(runs[-1].unit, unit):
            runs[-1] = UnitRun(runs[-1].unit, runs[-1].first, runs[-1].count + 1)
        else:
            runs.append(UnitRun(unit, place, 1))
        previous = key
    return tuple(runs)


def _alike(one: UnitProfile, other: UnitProfile) -> bool:
    return all(
        getattr(one, field) == getattr(other, field)
        for field in UnitProfile.model_fields
        if field != "name"
    )


def divided(runs: Sequence[UnitRun], keys: Sequence[object]) -> tuple[UnitRun, ...]:
    """Split `runs` at neighbors with different `keys`, one per unit of the model."""
    divided_runs: list[UnitRun] = []
    for run in runs:
        start = run.first
        for place in range(run.first + 1, run.last + 1):
            if place == run.last or keys[place] != keys[start]:
                divided_runs.append(UnitRun(run.unit, start, place - start))
                start = place
    return tuple(divided_runs)
