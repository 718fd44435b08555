"""What one microbatch asks of one tp rank: the sums that all rows with it share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from advisor.cost import CostModel
from advisor.cost.borders import sent_samples
from advisor.cost.communication import in_units
from advisor.cost.compute import UnitTime
from advisor.cost.loads import Loads
from advisor.cost.memory import backward_work, saved_bytes
from advisor.cost.unit_load import UnitLoad
from advisor.search.space import Floats
from engines.legality import numerics
from engines.plan import Plan, Recompute


@dataclass(frozen=True, slots=True)
class BorderTraffic:
    """What one microbatch sends over each place where a stage may begin, there and back, as bytes
    that are fixed and bytes for every sample."""

    there: tuple[Floats, Floats]
    back: tuple[Floats, Floats]

    def at(self, samples: float) -> tuple[Floats, Floats]:
        """Bytes (there, back) at every place."""
        there, back = (fixed + each * samples for fixed, each in (self.there, self.back))
        return there, back


def crossing_of(costs: CostModel, plan: Plan, places: Sequence[int]) -> BorderTraffic:
    """Of the borders before these units, in the numerics of `plan`."""
    kind = numerics(plan, costs.facts.model)

    def bytes_at(samples: float) -> Floats:
        found = [costs.stages.crossing(n, numerics=kind, samples=samples) for n in places]
        return np.array(found, dtype=float).reshape(-1, 2).T

    fixed, one = bytes_at(0.0), bytes_at(1.0)
    return BorderTraffic((fixed[0], one[0] - fixed[0]), (fixed[1], one[1] - fixed[1]))


@dataclass(frozen=True)
class Microbatch:
    """The units of a model at one size, and their times.

    Attributes:
        loads: of equal neighbours one that counts for all.
        crossing: what it sends between stages; `sent_share` of its samples by each rank.
        timed: works out `times` and `exchange_s`, which its memory does without.
    """

    loads: Loads
    recompute: Recompute
    crossing: BorderTraffic
    sent_share: float
    timed: Callable[[], tuple[tuple[UnitTime, ...], tuple[tuple[float, float], ...]]]

    @cached_property
    def crossed(self) -> tuple[Floats, Floats]:
        """Bytes that a rank sends over every place where a stage may begin, there and back."""
        return self.crossing.at(self.loads.samples * self.sent_share)

    @cached_property
    def _timed(self) -> tuple[tuple[UnitTime, ...], tuple[tuple[float, float], ...]]:
        return self.timed()

    @property
    def times(self) -> tuple[UnitTime, ...]:
        """Of each entry of the loads."""
        return self._timed[0]

    @property
    def exchange_s(self) -> tuple[tuple[float, float], ...]:
        """Of each entry of the loads, what it sends along tp and cp: in the forward, and in the
        backward with what is computed again."""
        return self._timed[1]

    @cached_property
    def units(self) -> tuple[UnitLoad, ...]:
        return self.loads.entries

    @cached_property
    def counts(self) -> Floats:
        """For how many units each stands."""
        return np.array([unit.count for unit in self.units], dtype=float)

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
    def exchanged_s(self) -> tuple[float, float]:
        """Of all units: in a forward, and in a backward."""
        there, back = zip(*self.exchange_s, strict=True)
        return self._sum(list(there)), self._sum(list(back))

    @cached_property
    def unit_s(self) -> Floats:
        """[2, entries]: of one unit, forward and backward, with all it sends along the tp axis."""
        found = [
            (
                t.forward_s + t.forward_launch_s + there,
                t.backward_s + t.backward_launch_s + t.recompute_s + t.recompute_launch_s + back,
            )
            for t, (there, back) in zip(self.times, self.exchange_s, strict=True)
        ]
        return np.array(found).T

    @cached_property
    def forward_share(self) -> float:
        """Of no unit the forward takes a larger part."""
        total = self.unit_s.sum(axis=0)
        return float((self.unit_s[0][total > 0] / total[total > 0]).max(initial=0.0))

    @cached_property
    def kept(self) -> Floats:
        """Bytes of each unit from its forward to its backward."""
        return np.array([saved_bytes(u, self.recompute) for u in self.units], dtype=float)

    # Blocks: what the least of them has

    @cached_property
    def _is_block(self) -> NDArray[np.bool_]:
        return np.array([unit.is_block for unit in self.units])

    def _least(self, amounts: Floats) -> float:
        return float(amounts[self._is_block].min(initial=np.inf)) if self.blocks else 0.0

    @cached_property
    def blocks(self) -> float:
        return float(self.counts[self._is_block].sum())

    @cached_property
    def block_s(self) -> tuple[float, float]:
        """Forward and backward."""
        there, back = self.unit_s
        return self._least(there), self._least(back)

    @cached_property
    def block_bytes(self) -> tuple[float, float]:
        """Parameters and gradients."""
        parameters = np.array([unit.parameter_bytes for unit in self.units], dtype=float)
        return self._least(parameters), self._least(self._gradients)

    @property
    def _gradients(self) -> Floats:
        return np.array([unit.gradient_bytes for unit in self.units], dtype=float)

    @cached_property
    def block_part(self) -> float:
        """Of all gradients, and so of an optimizer's states that are as large."""
        return self._least(self._gradients) / self.loads.gradient_bytes

    @cached_property
    def block_kept_bytes(self) -> float:
        return self._least(self.kept)

    # Borders

    @cached_property
    def least_sent_bytes(self) -> float:
        """Over any border, whichever way is more."""
        there, back = self.crossed
        return float(np.maximum(there, back).min(initial=np.inf)) if len(there) else 0.0

    @cached_property
    def most_sent_bytes(self) -> float:
        there, back = self.crossed
        return float(np.maximum(there, back).max(initial=0.0))

    @cached_property
    def least_held_bytes(self) -> float:
        """Over any border, whichever way is less."""
        there, back = self.crossed
        return float(np.minimum(there, back).min(initial=np.inf)) if len(there) else 0.0

    @cached_property
    def separate(self) -> Counter[tuple[float, float, float]]:
        """(parameter, gradient, sharded expert) bytes of the units that FSDP gathers, and how many
        there are."""
        found: Counter[tuple[float, float, float]] = Counter()
        for unit, count in zip(self.units, self.counts, strict=True):
            if unit.is_separate:
                key = unit.parameter_bytes, unit.gradient_bytes, unit.expert_bytes
                found[key] += int(count)
        return found

    @property
    def root(self) -> Counter[tuple[float, float, float]]:
        """The same of all the others, which are gathered as one."""
        return Counter({(self.loads.root_parameter_bytes, self.loads.root_gradient_bytes, 0.0): 1})

    @cached_property
    def unit_bytes(self) -> float:
        """What a rank holds at least, whichever units it has, if it has the largest of them."""
        return float((self.kept + self.work).max())

    @cached_property
    def work(self) -> Floats:
        """Bytes that each unit's backward holds beside what was kept."""
        kept = zip(self.units, self.kept.tolist(), strict=True)
        return np.array([backward_work(unit, self.recompute, one) for unit, one in kept])


# What a microbatch has at any size.
_ALWAYS = (
    "units",
    "counts",
    "blocks",
    "block_bytes",
    "block_part",
    "separate",
    "_is_block",
)


class Growing:
    """The memory of a microbatch of any size from two sizes: no more than it takes.

    What units keep grows by the sample; what they work in is the largest of several sums that do,
    so that it grows faster beyond two sizes than between them.
    """

    def __init__(self, one: Microbatch, two: Microbatch) -> None:
        self._two = two
        samples = two.loads.samples - one.loads.samples
        self._kept = (two.kept - one.kept) / samples
        self._work = (two.work - one.work) / samples
        self._always = {name: getattr(two, name) for name in _ALWAYS}

    def at(self, samples: int) -> Microbatch:
        """Of more samples than the two have; times are those of the larger of them."""
        two = self._two
        further = samples - two.loads.samples
        crossed = two.crossing.at(samples * two.sent_share)
        there, back = crossed
        least = float(np.minimum(there, back).min(initial=np.inf)) if len(there) else 0.0
        found = Microbatch(two.loads, two.recompute, two.crossing, two.sent_share, two.timed)
        vars(found).update(
            self._always,
            crossed=crossed,
            kept=two.kept + further * self._kept,
            work=two.work + further * self._work,
            least_held_bytes=least,
        )
        return found


def microbatch(costs: CostModel, plan: Plan, crossing: BorderTraffic) -> Microbatch:
    """The microbatch of `plan`; of degrees only tp and cp matter."""
    loads = costs.loads(plan)
    share = sent_samples(plan, costs.stack) / loads.samples
    return Microbatch(loads, plan.recompute, crossing, share, lambda: _timed(costs, plan, loads))


def _timed(
    costs: CostModel, plan: Plan, loads: Loads
) -> tuple[tuple[UnitTime, ...], tuple[tuple[float, float], ...]]:
    inside = in_units(plan, loads, costs.ledger(), stack=costs.stack)
    back = (one + again for one, again in zip(inside.backward_s, inside.again_s, strict=True))
    exchange_s = tuple(zip(inside.forward_s, back, strict=True))
    return costs.computing(plan, loads).times, exchange_s
