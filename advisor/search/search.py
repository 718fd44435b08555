"""Branch and bound over a space: the exact answers of weighing every row, from few of them.

Rows are taken in the order of their lower bounds; one whose bound is above the best that was found
cannot be better, nor can any that comes after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from advisor.inputs.policy import Objective, Policy
from advisor.search.bounds import ROUNDING, Bounds, bounds_of
from advisor.search.cache import SearchCache
from advisor.search.columns import unique
from advisor.search.ranking import (
    NOT_ESTIMATED,
    Candidate,
    fastest_first,
    fits_device,
    judged,
    losing_one_plan,
    simplest_first,
    simplicity,
    simplicity_columns,
    smallest_first,
    tie_limit_s,
)
from advisor.search.space import KINDS, SCHEDULES, Space
from advisor.search.stages import StageSearch
from engines.plan import Plan, Schedule

# Plans of which none fits that are estimated to find which of them misses by least.
_MOST_MISSING = 12
Rows = NDArray[np.int64]
"""Numbers of rows of a space."""


class Search:
    """Questions about a space, answered exactly; what was weighed once is kept.

    Attributes:
        space: the rows.
        bounds: no estimate is below them.
        usable_bytes: of a device.
    """

    def __init__(
        self, kept: SearchCache, policy: Policy, space: Space, stages: StageSearch
    ) -> None:
        costs = kept.costs
        self.space = space
        self.bounds: Bounds = bounds_of(space, kept, policy)
        self._costs = costs
        self._policy = policy
        self._stages = stages
        self._weighed: dict[int, Candidate] = {}
        self._failed: set[int] = set()
        self.usable_bytes = policy.usable_bytes(costs.facts.cluster.device)
        missing = self.bounds.peak_high_bytes * (1 - ROUNDING) - self.usable_bytes
        self._missing = np.maximum(0.0, missing)

    @property
    def rows(self) -> Rows:
        return np.arange(len(self.space))

    @property
    def weighed(self) -> list[Candidate]:
        """Rows that were estimated exactly, in the order of the space."""
        return [self._weighed[index] for index in sorted(self._weighed)]

    @property
    def left_out(self) -> Counter[str]:
        """Rows that do not fit, by rule: as they were estimated, or already by their bound.

        Of rows that were not estimated some more may not fit.
        """
        counts = Counter(c.finding.rule for c in self._weighed.values() if c.finding)
        by_bound = np.flatnonzero(self._missing > 0)
        counts[fits_device.__name__.replace("_", "-")] += len(by_bound) - sum(
            bool(self._missing[index] > 0) for index in self._weighed
        )
        counts[NOT_ESTIMATED] = len(self._failed)
        return +counts

    def weigh_all(self) -> None:
        """Estimate every row."""
        for index in range(len(self.space)):
            self.candidate(index)

    def candidate(self, index: int) -> Candidate | None:
        """A row, estimated; None where it cannot be (`rules.losing_one_plan`)."""
        if index not in self._weighed and index not in self._failed:
            is_first = not self._failed
            self._failed.add(index)
            with losing_one_plan(self.space.plan(index), is_said=is_first):
                plan = self._stages.plan(self.space, index)
                self._weighed[index] = judged(plan, self._costs, self._policy)
                self._failed.remove(index)
        return self._weighed.get(index)

    def kinds(self) -> list[tuple[Plan, Rows]]:
        """Rows that use the same axes and shard the same, with a plan that stands for them.

        Its stages are not named.
        """
        space = self.space
        different, group = unique(np.stack([space.pp > 1, space.tp > 1, space.cp > 1, space.kind]))
        found = (np.flatnonzero(group == number) for number in range(different.shape[1]))
        return [(space.plan(int(rows[0])), rows) for rows in found]

    def besides(self, rows: Rows, plan: Plan) -> Rows:
        """Those of `rows` with other degrees or another kind than `plan`."""
        space = self.space
        same = space.kind[rows] == KINDS.index(plan.data_parallel)
        for axis in ("pp", "tp", "cp", "dp_replicate", "dp_shard"):
            same &= getattr(space, axis)[rows] == getattr(plan, axis)
        same &= space.offload is plan.offload and space.offload_to is plan.offload_to
        same &= space.ep == plan.ep
        return np.asarray(rows[~same])

    def with_schedule(self, rows: Rows, schedule: Schedule) -> Rows:
        """Those of `rows` in this schedule; all where none is."""
        found = rows[self.space.schedule[rows] == SCHEDULES.index(schedule)]
        return np.asarray(found if len(found) else rows)

    def strongest(self, rows: Rows, *, most: int | None = None) -> Candidate | None:
        """The fastest that fits (the smallest, where memory is the objective), else the one that
        misses by least; None where the first `most` by their bounds do not tell, or where none fits
        the first few."""
        is_memory = self._policy.objective is Objective.MEMORY
        bounds = self.bounds.step_s
        key: Callable[[Candidate], tuple[Any, ...]] = fastest_first
        if is_memory:
            bounds, key = self.bounds.peak_high_bytes, smallest_first
        try:
            found = self._least(self._may_fit(rows), bounds, key, most=most)
            least = most or _MOST_MISSING
            return found or self._least(rows, self._missing, _by_missing, fits=False, most=least)
        except _TooMany:
            return None

    def least_step_s(self, rows: Rows) -> float:
        """Of those that may fit none is faster."""
        return float(self.bounds.step_s[self._may_fit(rows)].min(initial=np.inf))

    def fastest(self, rows: Rows) -> Candidate | None:
        """Of those that fit; on equal times the simpler one."""
        return self._least(self._may_fit(rows), self.bounds.step_s, fastest_first)

    def smallest(self, rows: Rows) -> Candidate | None:
        """Of those that fit the one with the most memory left."""
        return self._least(self._may_fit(rows), self.bounds.peak_high_bytes, smallest_first)

    @property
    def least_missing_bytes(self) -> float:
        """No row misses memory by less."""
        return float(self._missing.min(initial=np.inf))

    def nearest(self, rows: Rows, *, below_bytes: float = np.inf) -> Candidate | None:
        """The one that misses memory by least, for rows of which none fits; None where none of them
        misses by less than `below_bytes`."""
        rows = rows[self._missing[rows] * (1 - ROUNDING) <= below_bytes]
        return self._least(rows, self._missing, _by_missing, fits=False, below=below_bytes)

    def preferred(self, rows: Rows) -> Candidate | None:
        """What `advisor.search.ranking.preferred` takes of all rows that fit; None if none does."""
        match self._policy.objective:
            case Objective.TIME:
                return self.fastest(rows)
            case Objective.MEMORY:
                return self.smallest(rows)
        fastest = self.fastest(rows)
        if fastest is None:
            return None
        return self.simplest(rows, tie_limit_s(fastest.estimate.step_s, self._policy))

    @property
    def may_fit(self) -> NDArray[np.bool_]:
        """By row: whether its bound of memory leaves that open."""
        return np.asarray(self._missing == 0)

    def with_borders(self, index: int) -> tuple[float, float]:
        """Seconds and bytes that a row's estimate is not below, with the borders of its stages; a
        little less, for rounding."""
        step_s = self._stages.least_step_s(self.space, index)
        nbytes = self._stages.least_peak_bytes(self.space, index)
        return (
            max(step_s, float(self.bounds.step_s[index])) * (1 - ROUNDING),
            max(nbytes, float(self.bounds.peak_high_bytes[index])) * (1 - ROUNDING),
        )

    def _may_fit(self, rows: Rows) -> Rows:
        return np.asarray(rows[self._missing[rows] == 0])

    def _least(
        self,
        rows: Rows,
        bounds: NDArray[np.float64],
        key: Callable[[Candidate], tuple[Any, ...]],
        *,
        fits: bool = True,
        most: int | None = None,
        below: float = np.inf,
    ) -> Candidate | None:
        """The candidate of least key, whose first number `bounds` are not above, nor is `below`.

        Raises:
            _TooMany: the first `most` rows leave open whether another one is better.
        """
        ordered = rows[np.argsort(bounds[rows], kind="stable")]
        shown, left = (ordered, ordered[:0]) if most is None else (ordered[:most], ordered[most:])
        best: Candidate | None = None
        least: tuple[Any, ...] = (below,)
        # Rows that wait for their turn with the borders that are best for them.
        waiting: list[tuple[float, int, int]] = []
        for place in range(len(shown) + 1):
            bound = bounds[shown[place]] if place < len(shown) else np.inf
            while waiting and waiting[0][0] <= min(bound, least[0] * (1 + ROUNDING)):
                index = heappop(waiting)[-1]
                if fits and self._surely_misses(index):
                    continue
                candidate = self.candidate(index)
                if candidate is not None and (candidate.fits or not fits):
                    found = key(candidate)
                    if found < least:
                        best, least = candidate, found
            if place == len(shown) or bound * (1 - ROUNDING) > least[0]:
                break
            index = int(shown[place])
            if bounds is self.bounds.step_s:
                bound = max(bound, self._stages.least_step_s(self.space, index))
            elif bounds is self._missing and self._surely_misses(index):
                bound = max(bound, float(self._missing[index]))
            heappush(waiting, (bound, place, index))
        if len(left) and bounds[left[0]] * (1 - ROUNDING) <= least[0]:
            raise _TooMany
        return best

    def _surely_misses(self, index: int) -> bool:
        """Whether a row does not fit with the borders that are best for it; noted as its bound."""
        if index not in self._weighed:
            least = 0.0
            with losing_one_plan(self.space.plan(index), is_said=False):
                least = self._stages.least_peak_bytes(self.space, index)
            missing = least * (1 - ROUNDING) - self.usable_bytes
            self._missing[index] = max(self._missing[index], missing)
        return bool(self._missing[index] > 0)

    def simplest(self, rows: Rows, limit_s: float) -> Candidate | None:
        """Of those that fit and take no longer than `limit_s` the simplest; of equally simple ones
        the fastest."""
        rows = self._may_fit(rows)
        rows = rows[self.bounds.step_s[rows] * (1 - ROUNDING) <= limit_s]
        for group in self._by_simplicity(rows):
            best, least_s = None, limit_s
            for index in group[np.argsort(self.bounds.step_s[group], kind="stable")]:
                if self.bounds.step_s[index] * (1 - ROUNDING) > least_s:
                    break
                step_s = self._stages.least_step_s(self.space, int(index))
                if step_s * (1 - ROUNDING) > least_s or self._surely_misses(int(index)):
                    continue
                candidate = self.candidate(int(index))
                if candidate is None or not candidate.fits:
                    continue
                if candidate.estimate.step_s > limit_s:
                    continue
                if best is None or simplest_first(candidate) < simplest_first(best):
                    best, least_s = candidate, candidate.estimate.step_s
            if best is not None:
                return best
        return None

    def _by_simplicity(self, rows: Rows) -> Iterator[Rows]:
        """Groups of equally simple rows, simplest first."""
        columns = np.stack(simplicity_columns(self.space.part(rows)))
        order = np.lexsort(columns[::-1])
        columns = columns[:, order]
        starts = np.flatnonzero((columns[:, 1:] != columns[:, :-1]).any(axis=0)) + 1
        # Equally simple rows stay in the order of the space.
        for group in np.split(order, starts):
            yield np.asarray(rows[group])


class _TooMany(Exception):
    """A question is left open: no answer would depend on it enough."""


def _by_missing(candidate: Candidate) -> tuple[Any, ...]:
    missing = candidate.finding.missing_bytes if candidate.finding else 0.0
    return missing, simplicity(candidate.plan), str(candidate.plan)
