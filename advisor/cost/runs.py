"""Equal units one after the other: what is true of one is true of all, and is worked out once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from profiles.model.profile import ModelProfile, UnitProfile


@dataclass(frozen=True, slots=True)
class Run:
    """Units [first, first + count) of a model, equal but for their names and places."""

    unit: UnitProfile
    first: int
    count: int

    @property
    def last(self) -> int:
        """The place after the run."""
        return self.first + self.count


def runs_of(model: ModelProfile) -> tuple[Run, ...]:
    """The units of `model` in order, equal neighbours together.

    Units whose measured times differ are different; those that FSDP treats differently are too.
    """
    separate = {unit.name for unit in model.shard_units()}
    timed = [times.units for times in model.times]
    found: list[Run] = []
    previous: tuple[object, ...] | None = None
    for place, unit in enumerate(model.units):
        key = (unit.name in separate, [units.get(unit.name) for units in timed])
        if previous == key and _alike(found[-1].unit, unit):
            found[-1] = Run(found[-1].unit, found[-1].first, found[-1].count + 1)
        else:
            found.append(Run(unit, place, 1))
        previous = key
    return tuple(found)


def _alike(one: UnitProfile, other: UnitProfile) -> bool:
    return all(
        getattr(one, field) == getattr(other, field)
        for field in UnitProfile.model_fields
        if field != "name"
    )


def divided(runs: Sequence[Run], keys: Sequence[object]) -> tuple[Run, ...]:
    """`runs` cut where neighbours have different `keys`, one for each unit of the model."""
    found: list[Run] = []
    for run in runs:
        start = run.first
        for place in range(run.first + 1, run.last + 1):
            if place == run.last or keys[place] != keys[start]:
                found.append(Run(run.unit, start, place - start))
                start = place
    return tuple(found)
