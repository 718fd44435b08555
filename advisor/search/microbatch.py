"""What one microbatch asks of one tp rank: the sums that all rows with it share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from advisor.cost import CostModel
from advisor.cost.compute import UnitTime
from advisor.cost.loads import Loads, UnitLoad
from engines.legality import numerics
from engines.plan import Plan, Recompute
from profiles.model import Numerics

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Microbatch:
    """The units of a model at one size, and their times.

    Attributes:
        loads, times: unit by unit; of equal neighbours one that counts for all.
        exchange_s: of each unit, what it sends along the tp axis.
    """

    loads: Loads
    times: tuple[UnitTime, ...]
    recompute: Recompute
    exchange_s: tuple[float, ...]

    @cached_property
    def units(self) -> tuple[UnitLoad, ...]:
        return tuple(self.loads.units)

    @cached_property
    def counts(self) -> Floats:
        """For how many units each stands."""
        return np.array([getattr(unit, "count", 1) for unit in self.units], dtype=float)

    def _sum(self, amounts: list[float]) -> float:
        return float(self.counts @ np.array(amounts))

    @cached_property
    def compute_s(self) -> float:
        return self._sum([t.forward_s + t.backward_s for t in self.times])

    @cached_property
    def recompute_s(self) -> float:
        return self._sum([t.recompute_s for t in self.times])

    @cached_property
    def launch_s(self) -> float:
        return self._sum(
            [t.forward_launch_s + t.backward_launch_s + t.recompute_launch_s for t in self.times]
        )

    @cached_property
    def forward_s(self) -> float:
        """With its launches; the rest of the seconds are the backward's."""
        return self._sum([t.forward_s + t.forward_launch_s for t in self.times])

    @property
    def busy_s(self) -> float:
        return self.compute_s + self.recompute_s + self.launch_s

    @cached_property
    def exchanged_s(self) -> float:
        return self._sum(list(self.exchange_s))

    @cached_property
    def kept(self) -> Floats:
        """Bytes of each unit from its forward to its backward."""
        return np.array([kept_bytes(unit, self.recompute) for unit in self.units])

    @cached_property
    def separate(self) -> Counter[tuple[float, float]]:
        """(parameter, gradient) bytes of the units that FSDP gathers, and how many there are."""
        found: Counter[tuple[float, float]] = Counter()
        for unit, count in zip(self.units, self.counts, strict=True):
            if unit.is_separate:
                found[unit.parameter_bytes, unit.gradient_bytes] += int(count)
        return found

    @property
    def root(self) -> Counter[tuple[float, float]]:
        """The same of all the others, which are gathered as one."""
        return Counter({(self.loads.root_parameter_bytes, self.loads.root_gradient_bytes): 1})

    @cached_property
    def fullest_bytes(self) -> float:
        """Activations when some unit's backward begins, with what that unit works in."""
        live = np.cumsum(self.counts * self.kept)
        work = np.array([_work_bytes(unit, self.recompute) for unit in self.units])
        return float((live + work).max())


def _work_bytes(unit: UnitLoad, recompute: Recompute) -> float:
    """What a backward holds beside what was kept: the gradient that comes in, and temporaries."""
    runs_again = unit.is_block and recompute is not Recompute.NONE
    if not runs_again:
        return unit.output_bytes + unit.backward_transient_bytes
    again = max(0.0, unit.activation_bytes - kept_bytes(unit, recompute))
    work = again + unit.backward_transient_bytes
    return unit.output_bytes + max(work, unit.forward_transient_bytes)


def microbatch(costs: CostModel, plan: Plan) -> Microbatch:
    """The microbatch of `plan`; of degrees only tp matters."""
    assert plan.microbatch_size is not None
    kind = numerics(plan, costs.facts.model)
    loads = costs._at(kind, plan.microbatch_size)
    dtype = costs.facts.model.dtype if kind is Numerics.AS_BUILT else "bfloat16"
    times = costs._computing(plan, loads, kind, dtype).times
    return Microbatch(loads, times, plan.recompute, (0.0,) * len(times))


def kept_bytes(unit: UnitLoad, recompute: Recompute) -> float:
    """What stays of a unit between its forward and its backward."""
    if not unit.is_block or recompute is Recompute.NONE:
        return unit.activation_bytes
    return unit.input_bytes if recompute is Recompute.FULL else unit.selective_bytes
