"""Branch and bound over a space: the same answers as an exhaustive search, from few estimates.

Rows are estimated in the order of their lower bounds. Once a bound exceeds the best estimate, no
further row can be better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from advisor.cost.memory.offload import states_leave
from advisor.inputs.policy import Objective, Policy
from advisor.search.bounds import Bounds, bounds_of, staged_peaks
from advisor.search.cache import SearchCache
from advisor.search.columns import ROUNDING, Microbatches, some_of_each, unique
from advisor.search.ranking import (
    FITS_HOST,
    NOT_ESTIMATED,
    Candidate,
    fastest_first,
    fits_device,
    judged,
    simplest_first,
    simplicity,
    simplicity_columns,
    skipped_on_error,
    smallest_first,
    tie_limit_s,
)
from advisor.search.space import KINDS, SCHEDULES, Space, plan_with
from advisor.search.stages import StageSearch
from engines.plan import OffloadTo, Plan, Schedule
from profiles.machine.cluster import ClusterProfile

# Rows estimated to find the nearest miss, if none fits.
_FEW_PASSES = 1024
"""Forwards of a round on all stages, which are played sooner than a peak is bounded."""
_MOST_MISSING = 12
Rows = NDArray[np.int64]
"""Indices of rows of a space."""


class Search:
    """Exact queries on a space; estimates are cached.

    Attributes:
        space: the rows.
        cache: results for the facts of the rows.
        bounds: lower bounds of their estimates.
        usable_bytes: of a device.
    """

    def __init__(
        self, cache: SearchCache, policy: Policy, space: Space, stages: StageSearch
    ) -> None:
        costs = cache.costs
        self.space = space
        self.bounds: Bounds = bounds_of(space, cache, policy)
        self.cache = cache
        self._costs = costs
        self._policy = policy
        self._stages = stages
        self._weighed: dict[int, Candidate] = {}
        self._failed: set[int] = set()
        self._with_borders_s: dict[int, float] = {}
        self._played: set[int] = set()
        self._may_fit_with_borders: set[int] = set()
        self.usable_bytes = policy.usable_bytes(costs.facts.cluster.device)
        self._lacks_host = _lacks_host(space, costs.facts.cluster)
        missing = self.bounds.peak_high_bytes * (1 - ROUNDING) - self.usable_bytes
        # It is not known how much rows miss that have no borders with which they fit.
        some = np.where(np.isinf(self.bounds.fitting_s), np.finfo(float).tiny, 0.0)
        self._missing = np.maximum(some, missing)

    @property
    def rows(self) -> Rows:
        return np.arange(len(self.space))

    @property
    def weighed(self) -> list[Candidate]:
        """Estimated rows, in the order of the space."""
        return [self._weighed[index] for index in sorted(self._weighed)]

    @property
    def estimated(self) -> list[int]:
        """Rows that were estimated."""
        return list(self._weighed)

    @property
    def left_out(self) -> Counter[str]:
        """Number of rows that do not fit, by rule, according to their estimate or their bound.

        Further rows that were not estimated may not fit.
        """
        counts = Counter(c.finding.rule for c in self._weighed.values() if c.finding)
        by_bound = np.flatnonzero(self._missing > 0)
        counts[fits_device.__name__.replace("_", "-")] += len(by_bound) - sum(
            bool(self._missing[index] > 0) for index in self._weighed
        )
        if self._lacks_host:
            weighed = list(self._weighed)
            counts[FITS_HOST] += int(self.may_fit.sum() - self.may_fit[weighed].sum())
        counts[NOT_ESTIMATED] = len(self._failed)
        return +counts

    def refine(self, rows: Rows) -> None:
        """Raise bounds of the peak that are rough."""
        rough = rows[self.bounds.is_rough[rows]]
        if not len(rough):
            return
        peak = staged_peaks(self.space.part(rough), Microbatches(self.space, self.cache))
        self.bounds.peak_high_bytes[rough] = peak
        self.bounds.is_rough[rough] = False
        self._missing[rough] = peak * (1 - ROUNDING) - self.usable_bytes

    def _refine_least(self, rows: Rows, most: int) -> None:
        """Raise rough bounds until none is among the first `most` of the missing memory, or as
        small as the next."""
        shown = most
        while most < len(rows):
            limit = np.partition(self._missing[rows], most)[most]
            if not self.bounds.is_rough[rows[self._missing[rows] <= limit]].any():
                return
            # Each time some more, so that few passes are enough.
            shown = min(4 * shown, len(rows) - 1)
            limit = np.partition(self._missing[rows], shown)[shown]
            self.refine(rows[self._missing[rows] <= limit])
        self.refine(rows)

    def weigh_all(self) -> None:
        """Estimate every row."""
        for index in range(len(self.space)):
            self.candidate(index)

    def candidate(self, index: int) -> Candidate | None:
        """Estimate a row; None if that fails (see `skipped_on_error`)."""
        if index not in self._weighed and index not in self._failed:
            is_first = not self._failed
            self._failed.add(index)
            with skipped_on_error(self.space.plan(index) if is_first else None):
                plan = self._stages.plan(self.space, index)
                self._weighed[index] = judged(plan, self._costs, self._policy)
                self._failed.remove(index)
        return self._weighed.get(index)

    @cached_property
    def kinds(self) -> list[tuple[Plan, Rows]]:
        """Rows by axes and data-parallel kind, each group with one of its plans without stages."""
        space = self.space
        different, group = unique((space.pp > 1, space.tp > 1, space.cp > 1, space.kind))
        groups = (np.flatnonzero(group == number) for number in range(different.shape[1]))
        return [(space.plan(int(rows[0])), rows) for rows in groups]

    @cached_property
    def _alike(self) -> tuple[list[Plan], Rows]:
        """A plan, without stages, of all rows that are alike in axes, data-parallel kind and reach
        of shards, and the place of each row's among them."""
        space = self.space
        reach = space.dp_shard * space.cp * space.tp
        keys = space.pp > 1, space.tp > 1, space.cp > 1, space.kind, reach
        _, group = unique(keys)
        return [space.plan(row) for row in some_of_each(group).tolist()], group

    def where(self, is_wanted: Callable[[Plan], bool]) -> NDArray[np.bool_]:
        """Mask of rows by a question about a plan's axes, data-parallel kind, and reach of shards.

        It is asked of one plan, without stages, for all rows that are alike in these.
        """
        plans, group = self._alike
        return np.array([is_wanted(plan) for plan in plans], dtype=bool)[group]

    def with_other_degrees(self, rows: Rows, plan: Plan) -> Rows:
        """Select `rows` with other degrees or another kind than `plan`."""
        space = self.space
        same = space.kind[rows] == KINDS.index(plan.data_parallel)
        for axis in ("pp", "tp", "cp", "dp_replicate", "dp_shard"):
            same &= getattr(space, axis)[rows] == getattr(plan, axis)
        same &= space.offload is plan.offload and space.offload_to is plan.offload_to
        same &= space.ep == plan.ep
        return np.asarray(rows[~same])

    def with_schedule(self, rows: Rows, schedule: Schedule) -> Rows:
        """Select `rows` with this schedule; all if none has it."""
        matching = rows[self.space.schedule[rows] == SCHEDULES.index(schedule)]
        return np.asarray(matching if len(matching) else rows)

    def strongest(self, rows: Rows, *, most: int | None = None) -> Candidate | None:
        """Fastest of `rows` that fits (smallest, if memory is the objective), else the nearest
        miss; None if the first `most` rows, or the first few misses, do not decide it."""
        is_memory = self._policy.objective is Objective.MEMORY
        bounds = self.bounds.fitting_s
        key: Callable[[Candidate], tuple[Any, ...]] = fastest_first
        if is_memory:
            bounds, key = self.bounds.peak_high_bytes, smallest_first
        try:
            fitting = self._least(self._may_fit(rows), bounds, key, most=most)
            if fitting is not None:
                return fitting
            most = most or _MOST_MISSING
            self._refine_least(rows, most)
            return self._least(rows, self._missing, _by_missing, fits=False, most=most)
        except _TooMany:
            return None

    def least_step_s(self, rows: Rows) -> float:
        """Lower bound of the step over `rows` that may fit."""
        return float(self.bounds.fitting_s[self._may_fit(rows)].min(initial=np.inf))

    def fastest(self, rows: Rows, *, below_s: float = np.inf) -> Candidate | None:
        """Fastest of `rows` that fits, if it takes less than `below_s`; on equal times the simpler
        one."""
        bounds = self.bounds.fitting_s
        return self._least(self._may_fit(rows), bounds, fastest_first, below=below_s)

    def has_fitting(self, rows: Rows) -> bool:
        """Return True if any of `rows` fits; those with few stages are tried first, which are
        estimated fastest, and of these the smallest."""
        rows = self._may_fit(rows)
        order = np.lexsort((self.bounds.peak_high_bytes[rows], self.space.pp[rows]))
        for index in rows[order].tolist():
            candidate = None if self._cannot_fit(index) else self.candidate(index)
            if candidate is not None and candidate.fits:
                return True
        return False

    def smallest(self, rows: Rows) -> Candidate | None:
        """Smallest of `rows` that fits."""
        return self._least(self._may_fit(rows), self.bounds.peak_high_bytes, smallest_first)

    @property
    def least_missing_bytes(self) -> float:
        """Lower bound of the missing memory over all rows."""
        self.refine(self.rows)
        return float(self._missing.min(initial=np.inf))

    def nearest(self, rows: Rows, *, below_bytes: float = np.inf) -> Candidate | None:
        """Row with the least missing memory, if none of `rows` fits; None if all miss by
        `below_bytes` or more."""
        self.refine(rows)
        rows = rows[self._missing[rows] * (1 - ROUNDING) <= below_bytes]
        return self._least(rows, self._missing, _by_missing, fits=False, below=below_bytes)

    def preferred(self, rows: Rows) -> Candidate | None:
        """Result of `advisor.search.ranking.preferred` for `rows` that fit; None if none does."""
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
        """Mask of rows whose lower bound of memory fits."""
        return np.asarray(self._missing == 0)

    def with_borders(self, index: int) -> tuple[float, float]:
        """Lower bounds of a row's seconds and bytes with its borders, reduced for rounding."""
        nbytes = self._stages.least_peak_bytes(self.space, index)
        return (
            self._bordered_s(index) * (1 - ROUNDING),
            max(nbytes, float(self.bounds.peak_high_bytes[index])) * (1 - ROUNDING),
        )

    def _bordered_s(self, index: int) -> float:
        """Lower bound of a row's step with its borders."""
        if index not in self._with_borders_s:
            rounds_s = self._stages.least_rounds_s(self.space, index)
            self._raise(index, rounds_s + float(self.bounds.besides_s[index]))
        return self._with_borders_s[index]

    def played_s(self, index: int) -> float:
        """Lower bound of a row's step with its rounds played: closer, and takes longer."""
        if index not in self._played:
            wall_s, ended_s = self._stages.played_rounds_s(self.space, index)
            rounds_s = max(wall_s, ended_s + float(self.bounds.settling_s[index]))
            self._bordered_s(index)
            self._raise(index, rounds_s + float(self.bounds.besides_s[index]))
            self._played.add(index)
        return self._with_borders_s[index]

    def _raise(self, index: int, step_s: float) -> None:
        """Raise a row's bounds of the step, for later queries too."""
        step_s = max(self._with_borders_s.get(index, float(self.bounds.step_s[index])), step_s)
        self._with_borders_s[index] = step_s
        self.bounds.fitting_s[index] = max(self.bounds.fitting_s[index], step_s)

    def _may_fit(self, rows: Rows) -> Rows:
        return rows[:0] if self._lacks_host else np.asarray(rows[self._missing[rows] == 0])

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
        """Candidate with the least key, if the key's first number is less than `below`.

        Args:
            bounds: lower bounds of the key's first number.

        Raises:
            _TooMany: another row than the first `most` may be better.
        """
        if most is not None and most < len(rows):
            # No more need to be sorted: often a dozen of a million.
            rows = rows[bounds[rows] <= np.partition(bounds[rows], most)[most]]
        ordered = rows[np.argsort(bounds[rows], kind="stable")]
        shown, left = (ordered, ordered[:0]) if most is None else (ordered[:most], ordered[most:])
        best: Candidate | None = None
        least: tuple[Any, ...] = (below,)
        # Rows whose bound with their stage borders is larger than without: (bound, place, index).
        waiting: list[tuple[float, int, int]] = []
        for place in range(len(shown) + 1):
            bound = bounds[shown[place]] if place < len(shown) else np.inf
            while waiting and waiting[0][0] <= min(bound, least[0] * (1 + ROUNDING)):
                _, number, index = heappop(waiting)
                if bounds is self.bounds.fitting_s and index not in self._played:
                    if not (fits and self._cannot_fit_unplayed(index)):
                        self.played_s(index)
                        heappush(waiting, (float(bounds[index]), number, index))
                    continue
                if fits and self._cannot_fit(index):
                    continue
                candidate = self.candidate(index)
                if candidate is not None and (candidate.fits or not fits):
                    rank = key(candidate)
                    if rank < least:
                        best, least = candidate, rank
            if place == len(shown) or bound * (1 - ROUNDING) > least[0]:
                break
            index = int(shown[place])
            if bounds is self.bounds.fitting_s:
                self._bordered_s(index)
                bound = float(bounds[index])
            elif bounds is self._missing:
                enough_bytes = self.usable_bytes + least[0]
                bound = max(bound, self._least_missing(index, enough_bytes=enough_bytes))
            heappush(waiting, (bound, place, index))
        if len(left) and bounds[left[0]] * (1 - ROUNDING) <= least[0]:
            raise _TooMany
        return best

    def _cannot_fit(self, index: int) -> bool:
        """Return True if a row exceeds memory with its best borders; its bound is raised."""
        is_known = index in self._weighed or index in self._may_fit_with_borders
        if not is_known and self._least_missing(index, enough_bytes=self.usable_bytes) == 0:
            self._may_fit_with_borders.add(index)
        return bool(self._missing[index] > 0)

    def _cannot_fit_unplayed(self, index: int) -> bool:
        """As `_cannot_fit`; where rounds are played sooner than memory is bounded stage by stage,
        by the bound of ranks with several stages alone."""
        space = self.space
        stages = int(space.pp[index]) * int(space.per_rank[index])
        if stages * int(space.microbatches[index]) > _FEW_PASSES:
            return self._cannot_fit(index)
        if index not in self._weighed and index not in self._may_fit_with_borders:
            with skipped_on_error(None):
                least = self._stages.several_peak_bytes(self.space, index)
                self._raise_missing(index, least)
        return bool(self._missing[index] > 0)

    def _raise_missing(self, index: int, least_bytes: float) -> None:
        missing = least_bytes * (1 - ROUNDING) - self.usable_bytes
        self._missing[index] = max(self._missing[index], missing)

    def _least_missing(self, index: int, *, enough_bytes: float = np.inf) -> float:
        """Raise a row's bound of the missing memory by its best borders; ranks are looked at until
        one takes more than `enough_bytes`."""
        if index not in self._weighed:
            least, enough_bytes = 0.0, enough_bytes / (1 - ROUNDING)
            with skipped_on_error(None):
                least = self._stages.least_peak_bytes(self.space, index, enough_bytes=enough_bytes)
            self._raise_missing(index, least)
        return float(self._missing[index])

    def simplest(self, rows: Rows, limit_s: float) -> Candidate | None:
        """Simplest of `rows` that fits within `limit_s`; of equally simple ones the fastest."""
        rows = self._may_fit(rows)
        rows = rows[self.bounds.fitting_s[rows] * (1 - ROUNDING) <= limit_s]
        for group in self._by_simplicity(rows):
            best, least_s = None, limit_s
            for index in group[np.argsort(self.bounds.fitting_s[group], kind="stable")]:
                if self.bounds.fitting_s[index] * (1 - ROUNDING) > least_s:
                    break
                self._bordered_s(int(index))
                if self._is_slower(index, least_s) or self._cannot_fit_unplayed(int(index)):
                    continue
                self.played_s(int(index))
                if self._is_slower(index, least_s) or self._cannot_fit(int(index)):
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

    def _is_slower(self, index: int, than_s: float) -> bool:
        return bool(self.bounds.fitting_s[index] * (1 - ROUNDING) > than_s)

    def _by_simplicity(self, rows: Rows) -> Iterator[Rows]:
        """Groups of equally simple rows, simplest first."""
        columns = np.stack(simplicity_columns(self.space.part(rows)))
        order = np.lexsort(columns[::-1])
        columns = columns[:, order]
        starts = np.flatnonzero((columns[:, 1:] != columns[:, :-1]).any(axis=0)) + 1
        # Equally simple rows stay in the order of the space.
        for group in np.split(order, starts):
            yield np.asarray(rows[group])


def _lacks_host(space: Space, cluster: ClusterProfile) -> bool:
    """Return True if all rows offload states to a main memory of unknown size: none fits."""
    plan = plan_with(offload=space.offload, offload_to=space.offload_to)
    is_host = space.offload_to is OffloadTo.HOST and cluster.host_memory_bytes is None
    return is_host and states_leave(plan, cluster.device)


class _TooMany(Exception):
    """Query that would take too many estimates."""


def _by_missing(candidate: Candidate) -> tuple[Any, ...]:
    missing = candidate.finding.missing_bytes if candidate.finding else 0.0
    return missing, simplicity(candidate.plan), str(candidate.plan)
