"""Cost of one microbatch on one rank of the tp axis: sums that all rows with it share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from advisor.cost import CostModel
from advisor.cost.communication.exchange import in_units
from advisor.cost.compute.unit_times import UnitTime
from advisor.cost.estimates.borders import sent_samples
from advisor.cost.load.loads import Loads
from advisor.cost.load.unit_load import UnitLoad
from advisor.cost.memory.timeline import backward_work, saved_bytes
from advisor.search.space import Floats
from engines.legality import numerics
from engines.plan import Plan, Recompute


@dataclass(frozen=True, slots=True)
class BorderTraffic:
    """Traffic of one microbatch over each possible border between stages.

    Attributes:
        activations, gradients: fixed bytes, and bytes per sample.
    """

    activations: tuple[Floats, Floats]
    gradients: tuple[Floats, Floats]

    def at(self, samples: float) -> tuple[Floats, Floats]:
        """Bytes of (activations, gradients) over every border."""
        activations, gradients = (
            fixed + each * samples for fixed, each in (self.activations, self.gradients)
        )
        return activations, gradients


def border_traffic(costs: CostModel, plan: Plan, places: Sequence[int]) -> BorderTraffic:
    """Traffic over the borders before these units, in the numerics of `plan`."""
    kind, shares = numerics(plan, costs.facts.model), costs.shares(plan)

    def bytes_at(samples: float) -> Floats:
        pairs = [
            costs.stages.crossing(n, numerics=kind, samples=samples, shares=shares) for n in places
        ]
        return np.array(pairs, dtype=float).reshape(-1, 2).T

    fixed, one = bytes_at(0.0), bytes_at(1.0)
    return BorderTraffic((fixed[0], one[0] - fixed[0]), (fixed[1], one[1] - fixed[1]))


@dataclass(frozen=True)
class Microbatch:
    """Units of a model at one microbatch size, and their times.

    Attributes:
        loads: of the units, equal neighbours combined.
        traffic: between stages; each rank sends `sent_share` of the samples.
        timed: computes `times` and `exchange_s` when they are needed; memory does not need them.
    """

    loads: Loads
    recompute: Recompute
    traffic: BorderTraffic
    sent_share: float
    timed: Callable[[], tuple[tuple[UnitTime, ...], tuple[tuple[float, float], ...]]]

    @cached_property
    def border_bytes(self) -> tuple[Floats, Floats]:
        """Bytes of (activations, gradients) that a rank sends over every possible border."""
        return self.traffic.at(self.loads.samples * self.sent_share)

    @cached_property
    def _timed(self) -> tuple[tuple[UnitTime, ...], tuple[tuple[float, float], ...]]:
        return self.timed()

    @property
    def times(self) -> tuple[UnitTime, ...]:
        """Times of each entry of the loads."""
        return self._timed[0]

    @property
    def exchange_s(self) -> tuple[tuple[float, float], ...]:
        """Seconds of each entry's collectives over tp, cp and ep: in the forward, and in the
        backward, including recomputed forwards."""
        return self._timed[1]

    @cached_property
    def units(self) -> tuple[UnitLoad, ...]:
        return self.loads.entries

    @cached_property
    def counts(self) -> Floats:
        """Number of units that each entry represents."""
        return np.array([unit.count for unit in self.units], dtype=float)

    def _sum(self, amounts: list[float] | Floats) -> float:
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
        """Seconds of the forward with its launches; the rest of `busy_s` is the backward's."""
        return self._sum([t.forward_s + t.forward_launch_s for t in self.times])

    @property
    def busy_s(self) -> float:
        return self.compute_s + self.recompute_s + self.launch_s

    @cached_property
    def exchanged_s(self) -> tuple[float, float]:
        """Seconds of all units' collectives: in a forward, and in a backward."""
        forward, backward = zip(*self.exchange_s, strict=True)
        return self._sum(list(forward)), self._sum(list(backward))

    @cached_property
    def unit_s(self) -> Floats:
        """Seconds of one unit, [forward and backward, entries], with its collectives."""
        pairs = [
            (
                t.forward_s + t.forward_launch_s + sent,
                t.backward_s
                + t.backward_launch_s
                + t.recompute_s
                + t.recompute_launch_s
                + returned,
            )
            for t, (sent, returned) in zip(self.times, self.exchange_s, strict=True)
        ]
        return np.array(pairs).T

    @cached_property
    def forward_shares(self) -> tuple[float, float]:
        """Smallest and largest share of a block's seconds that its forward takes; of any unit's,
        without blocks."""
        both = self._both_s
        of = (both > 0) & (self.is_block if self.blocks else True)
        shares = self.unit_s[0][of] / both[of]
        return (float(shares.min()), float(shares.max())) if len(shares) else (0.0, 1.0)

    @cached_property
    def shorter_s(self) -> float:
        """Seconds by which forwards are shorter than the smallest of `forward_shares`."""
        return self._sum(np.maximum(0.0, self.forward_shares[0] * self._both_s - self.unit_s[0]))

    @cached_property
    def longer_s(self) -> float:
        """Seconds by which forwards are longer than the largest of `forward_shares`."""
        return self._sum(np.maximum(0.0, self.unit_s[0] - self.forward_shares[1] * self._both_s))

    @property
    def _both_s(self) -> Floats:
        return np.asarray(self.unit_s.sum(axis=0))

    @cached_property
    def saved(self) -> Floats:
        """Bytes that each unit saves from its forward to its backward."""
        return np.array([saved_bytes(u, self.recompute) for u in self.units], dtype=float)

    # The smallest block

    @cached_property
    def is_block(self) -> NDArray[np.bool_]:
        return np.array([unit.is_block for unit in self.units])

    def _least(self, amounts: Floats) -> float:
        return float(amounts[self.is_block].min(initial=np.inf)) if self.blocks else 0.0

    @cached_property
    def blocks(self) -> float:
        return float(self.counts[self.is_block].sum())

    @cached_property
    def block_s(self) -> tuple[float, float]:
        """Seconds of the fastest block's forward, and of the fastest backward."""
        forward, backward = self.unit_s
        return self._least(forward), self._least(backward)

    @cached_property
    def of_units(self) -> Floats:
        """Bytes of each unit's (parameters, gradients, parameters in FSDP's root group, experts
        that are not sharded with the rest), [4, entries]."""
        amounts = [
            (
                unit.parameter_bytes,
                unit.gradient_bytes,
                unit.parameter_bytes * (not unit.is_separate),
                unit.unsharded_bytes,
            )
            for unit in self.units
        ]
        return np.array(amounts, dtype=float).T

    @cached_property
    def of_block(self) -> Floats:
        """The least of each in `of_units` of a block."""
        return np.array([self._least(amounts) for amounts in self.of_units])

    def of_ends(self, ends: Sequence[slice]) -> Floats:
        """Sums of `of_units`, and of `saved`, over units at these places that are no blocks."""
        entry = np.repeat(np.arange(len(self.units)), self.counts.astype(int))
        amounts = np.vstack([self.of_units, self.saved]) * ~self.is_block
        return np.array([amounts[:, entry[end]].sum(axis=1) for end in ends])

    @cached_property
    def block_saved_bytes(self) -> float:
        return self._least(self.saved)

    # Borders

    @cached_property
    def least_sent_bytes(self) -> float:
        """Larger of activations and gradients, over the border where that is least."""
        activations, gradients = self.border_bytes
        larger = np.maximum(activations, gradients)
        return float(larger.min(initial=np.inf)) if len(larger) else 0.0

    @cached_property
    def most_sent_bytes(self) -> float:
        activations, gradients = self.border_bytes
        return float(np.maximum(activations, gradients).max(initial=0.0))

    @cached_property
    def least_received_bytes(self) -> float:
        """Smaller of activations and gradients, over the border where that is least."""
        return _least_received_bytes(*self.border_bytes)

    @cached_property
    def separate(self) -> Counter[tuple[float, float, float]]:
        """Number of units with their own FSDP group, by (parameter, gradient, sharded expert)
        bytes."""
        groups: Counter[tuple[float, float, float]] = Counter()
        for unit, count in zip(self.units, self.counts, strict=True):
            if unit.is_separate:
                key = unit.parameter_bytes, unit.gradient_bytes, unit.expert_bytes
                groups[key] += int(count)
        return groups

    @property
    def root(self) -> Counter[tuple[float, float, float]]:
        """`separate` for FSDP's root group, which has all other units."""
        return Counter({(self.loads.root_parameter_bytes, self.loads.root_gradient_bytes, 0.0): 1})

    @cached_property
    def largest_unit_bytes(self) -> float:
        """Bytes of the largest unit's backward, which some rank holds."""
        return float((self.saved + self.work).max())

    @cached_property
    def work(self) -> Floats:
        """Bytes of each unit's backward, without those saved."""
        saved = zip(self.units, self.saved.tolist(), strict=True)
        return np.array([backward_work(unit, self.recompute, nbytes) for unit, nbytes in saved])


def _least_received_bytes(activations: Floats, gradients: Floats) -> float:
    smaller = np.minimum(activations, gradients)
    return float(smaller.min(initial=np.inf)) if len(smaller) else 0.0


# Properties that do not depend on the size.
_OF_ANY_SIZE = (
    "units",
    "counts",
    "blocks",
    "of_units",
    "of_block",
    "separate",
    "is_block",
)


class ExtrapolatedMicrobatch:
    """Memory of a microbatch of any size, extrapolated from two sizes: a lower bound.

    Saved bytes are linear in samples. Work is a maximum of sums that are linear in samples, so it
    grows faster beyond the two sizes than between them.
    """

    def __init__(self, one: Microbatch, two: Microbatch) -> None:
        self._two = two
        samples = two.loads.samples - one.loads.samples
        self._saved_per_sample = (two.saved - one.saved) / samples
        self._work_per_sample = (two.work - one.work) / samples
        self._of_any_size = {name: getattr(two, name) for name in _OF_ANY_SIZE}

    def at(self, samples: int) -> Microbatch:
        """Microbatch of more samples than the two have; times are those of the larger one."""
        two = self._two
        further = samples - two.loads.samples
        border_bytes = two.traffic.at(samples * two.sent_share)
        larger = Microbatch(two.loads, two.recompute, two.traffic, two.sent_share, two.timed)
        vars(larger).update(
            self._of_any_size,
            border_bytes=border_bytes,
            saved=two.saved + further * self._saved_per_sample,
            work=two.work + further * self._work_per_sample,
            least_received_bytes=_least_received_bytes(*border_bytes),
        )
        return larger


def microbatch(costs: CostModel, plan: Plan, traffic: BorderTraffic) -> Microbatch:
    """Microbatch of `plan`; of its degrees only tp, cp and ep matter."""
    loads = costs.loads(plan)
    share = sent_samples(plan, costs.stack) / loads.samples
    # How many blocks a stage has is not known here: bounds count all of them as recomputed in
    # memory, and none in time.
    timed = plan if plan.recompute_blocks is None else plan.recomputing(Recompute.NONE)
    return Microbatch(loads, plan.recompute, traffic, share, lambda: _timed(costs, timed, loads))


def _timed(
    costs: CostModel, plan: Plan, loads: Loads
) -> tuple[tuple[UnitTime, ...], tuple[tuple[float, float], ...]]:
    inside = in_units(plan, loads, costs.ledger(), stack=costs.stack)
    backward = (own + again for own, again in zip(inside.backward_s, inside.again_s, strict=True))
    exchange_s = tuple(zip(inside.forward_s, backward, strict=True))
    return costs.computing(plan, loads).times, exchange_s
