"""Stage borders by dynamic programming on time and memory, exact up to `MOST_AT_ONCE` segments.

Segments of a model, which have no borders inside, are grouped into contiguous stages. The memory of
a stage depends on its place in the pipeline, which determines its microbatches in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from profiles.errors import PlanError

Amounts = Sequence[float] | NDArray[np.float64]
Places = NDArray[np.int64]
"""Numbers of segments that stages may begin with, from 0 to the number of all, where they end."""
Matrix = NDArray[np.float64]
"""[i, j]: of a stage of segments i, ..., j - 1; n + 1 rows and columns for n segments."""
Window = tuple[slice, slice]

# Sums of seconds in another order differ in the last digits: such times count as equal.
_ROUNDING = 1e-9
# Times the mean stage, or the slowest segment if that takes longer: stages of most best cuts take
# less, and those that take longer need not be looked at.
_NEAR = 1.3
MOST_AT_ONCE = 256
"""Segments: the deepest published decoders have 126 blocks (arXiv:2407.21783)."""
_REACH = 64  # places to each side of a border


@dataclass(frozen=True, slots=True)
class StageCut:
    """Segments grouped into stages.

    Attributes:
        starts: the first segment of stages 1, 2, ...
        seconds: of the slowest stage.
        nbytes: of the fullest stage.
    """

    starts: tuple[int, ...]
    seconds: float
    nbytes: float


Entries = Callable[[Places, Places], tuple[Matrix, Matrix, Matrix]]


def sums_before(amounts: Amounts) -> NDArray[np.float64]:
    """Sums of the amounts before each place.

    >>> sums_before([1.0, 2.0]).tolist()
    [0.0, 1.0, 3.0]
    """
    return np.concatenate([[0.0], np.cumsum(np.asarray(amounts, dtype=float))])


def spans(
    amounts: Amounts, rows: Places | slice = slice(None), columns: Places | slice = slice(None)
) -> Matrix:
    """Sums over contiguous segments; of all, or of these rows and columns.

    >>> spans([1.0, 2.0])[0].tolist()
    [0.0, 1.0, 3.0]
    """
    return between(sums_before(amounts), rows, columns)


def between(sums: NDArray[np.float64], rows: Places | slice, columns: Places | slice) -> Matrix:
    """`spans` of amounts with these `sums_before`."""
    return np.asarray(sums[columns][None, :] - sums[rows][:, None])


def largest(amounts: Amounts) -> Matrix:
    """Maxima over contiguous segments.

    >>> largest([2.0, 1.0])[0].tolist()
    [0.0, 2.0, 2.0]
    """
    count = len(amounts)
    maxima = np.zeros((count + 1, count + 1))
    for start in range(count):
        maxima[start, start + 1 :] = np.maximum.accumulate(np.asarray(amounts[start:]))
    return maxima


def cut(
    seconds: Matrix,
    resident: Matrix,
    saved: Matrix,
    *,
    in_flight: Sequence[int],
    usable_bytes: float,
) -> StageCut:
    """Cut segments into stages that fit in memory, minimizing the seconds of the slowest stage.

    Of equally fast cuts it takes one whose fullest stage is smallest, then the one whose last
    stages begin first. If none fits, it takes one whose fullest stage is smallest.

    Args:
        seconds: of every possible stage.
        resident: bytes of every possible stage, without microbatches in flight.
        saved: bytes of every possible stage per microbatch in flight.
        in_flight: microbatches in flight of each stage; its length is the number of stages.

    Raises:
        PlanError: more stages than segments.
    """
    segments, stages = len(seconds) - 1, len(in_flight)
    if segments < stages:
        raise PlanError(
            f"{stages} stages need as many units that can begin one, there are {segments}",
            hints=[f"take at most {segments} stages"],
        )
    filled = np.where(np.tri(segments + 1, dtype=bool), np.inf, resident)
    is_equal = len(set(in_flight)) == 1
    every = filled + in_flight[0] * saved if is_equal else filled
    slowest = max(float(seconds[0, -1]) / stages, float(np.diagonal(seconds, 1).max()))
    for limit_s in (_NEAR * slowest, np.inf):
        ends = _ends(seconds, stages, limit_s)
        if not all(map(len, ends)):
            continue
        parts = [slice(places[0], places[-1] + 1) for places in ends]
        windows = list(pairwise(parts))
        if is_equal:  # stages differ only in their window
            possible = _Possible([seconds], [every], [(0, window) for window in windows], ends)
        else:
            times = [seconds[window] for window in windows]
            nbytes = [filled[w] + n * saved[w] for w, n in zip(windows, in_flight, strict=True)]
            possible = _Possible(times, nbytes, _whole(stages), ends)
        best = possible.fastest(usable_bytes)
        # All cuts that are as fast are among those with no slower stage.
        if best is not None and best.seconds * (1 + _ROUNDING) <= limit_s:
            return best
    return possible.smallest()


def _ends(seconds: Matrix, stages: int, limit_s: float) -> list[Places]:
    """Places where stages 0, 1, ... may begin, and the last one end, if none takes longer than
    `limit_s`; some are empty if that is impossible.

    Stage k begins at segment k or later, as stages before it have at least one segment each, and
    leaves one for each stage after it; and no stage has more segments than can be that fast.
    """
    segments = len(seconds) - 1
    places = np.arange(segments + 1)
    lengths = places[None, :] - places[:, None]
    longest = int(lengths[seconds <= limit_s].max())
    before = np.arange(stages + 1)
    first = np.maximum(before, segments - (stages - before) * longest)
    last = np.minimum(segments - stages + before, before * longest)
    return [places[low : high + 1] for low, high in zip(first, last, strict=True)]


def refined(
    segments: int, entries: Entries, *, in_flight: Sequence[int], usable_bytes: float
) -> StageCut:
    """`cut` of many segments, in passes from coarse to fine: time and memory of `cut` grow with
    the square of the segments.

    Borders are the best of a coarse grid, then the best of their neighborhoods on finer ones: as
    good as the best cut, or a few segments of the slowest stage worse.

    Args:
        entries: computes entries of the matrices `seconds`, `resident` and `saved` of `cut`, for
            these rows and columns.
    """
    stages = len(in_flight)
    # Every stage has a place to begin.
    step = max(1, min(-(-segments // max(MOST_AT_ONCE, stages + _REACH)), segments // stages))
    grid = np.append(np.arange(0, segments, step), segments)
    coarse = cut(*entries(grid, grid), in_flight=in_flight, usable_bytes=usable_bytes)
    best = replace(coarse, starts=tuple(grid[list(coarse.starts)].tolist()))
    while True:
        before, step = best, max(1, step // 4)
        offsets = step * np.arange(-_REACH, _REACH + 1)
        ends = [np.array([0])]
        for stage, start in enumerate(best.starts, 1):
            ends.append(np.unique((start + offsets).clip(stage, segments - stages + stage)))
        ends.append(np.array([segments]))
        times, nbytes = [], []
        for n, (rows, columns) in zip(in_flight, pairwise(ends), strict=True):
            seconds, resident, saved = entries(rows, columns)
            times.append(seconds)
            # Stages have at least one segment.
            is_stage = columns[None, :] > rows[:, None]
            nbytes.append(np.where(is_stage, resident + n * saved, np.inf))
        possible = _Possible(times, nbytes, _whole(stages), ends)
        best = possible.fastest(usable_bytes) or possible.smallest()
        if step == 1 and (best.seconds, best.nbytes) >= (before.seconds, before.nbytes):
            return best


@dataclass(frozen=True, slots=True)
class _Possible:
    """Possible stages: stage k begins at one of `ends[k]` and ends at one of the next.

    Attributes:
        seconds, nbytes: of stages; infinite bytes where there is none.
        windows: for every stage the number of its matrices, and its part of them.
    """

    seconds: Sequence[Matrix]
    nbytes: Sequence[Matrix]
    windows: Sequence[tuple[int, Window]]
    ends: Sequence[Places]

    def fastest(self, usable_bytes: float) -> StageCut | None:
        """Smallest of the fastest cuts that fit; None if none fits."""
        if not _can_be_cut([one <= usable_bytes for one in self._of(self.nbytes)]):
            return None
        pairs = list(zip(self.seconds, self.nbytes, strict=True))
        within = [np.where(one <= usable_bytes, times, np.inf) for times, one in pairs]
        limit = float(_reached(self._of(within))[-1][-1]) * (1 + _ROUNDING)
        pairs = list(zip(within, self.nbytes, strict=True))
        even = [np.where(times <= limit, one, np.inf) for times, one in pairs]
        return self._cut_at(_least(self._of(even)))

    def smallest(self) -> StageCut:
        """Cut whose fullest stage is smallest."""
        return self._cut_at(_least(self._of(self.nbytes)))

    def _of(self, matrices: Sequence[Matrix]) -> list[Matrix]:
        """Matrix of every stage."""
        return [matrices[number][window] for number, window in self.windows]

    def _cut_at(self, places: Sequence[int]) -> StageCut:
        chosen = list(pairwise([0, *places, -1]))
        seconds, nbytes = self._of(self.seconds), self._of(self.nbytes)
        return StageCut(
            starts=tuple(int(self.ends[k][place]) for k, place in enumerate(places, 1)),
            seconds=max(float(one[at]) for one, at in zip(seconds, chosen, strict=True)),
            nbytes=max(float(one[at]) for one, at in zip(nbytes, chosen, strict=True)),
        )


def _can_be_cut(fits: Sequence[NDArray[np.bool_]]) -> bool:
    """Return True if stages that fit lead from the first place to the last."""
    reached = fits[0][0]
    for of_stage in fits[1:]:
        reached = np.logical_or.reduce(of_stage[reached], axis=0)
    return bool(reached[-1])


def _whole(stages: int) -> list[tuple[int, Window]]:
    """Windows of stages with matrices of their own."""
    return [(stage, (slice(None), slice(None))) for stage in range(stages)]


def _reached(costs: Sequence[Matrix]) -> list[NDArray[np.float64]]:
    """Smallest largest cost of the first 1, 2, ... stages, for each place where they may end.

    Entry [i, j] of stage k is the cost from the i-th place where it may begin to the j-th where the
    next one may.
    """
    best = [costs[0][0]]
    for cost in costs[1:]:
        best.append(np.minimum.reduce(np.maximum(best[-1][:, None], cost), axis=0))
    return best


def _least(costs: Sequence[Matrix]) -> list[int]:
    """Places where stages 1, 2, ... begin in the cut with the smallest largest cost."""
    best = _reached(costs)
    end, places = -1, []
    for before, cost in zip(reversed(best[:-1]), reversed(costs[1:]), strict=True):
        end = int(np.maximum(before, cost[:, end]).argmin())
        places.append(end)
    return places[::-1]
