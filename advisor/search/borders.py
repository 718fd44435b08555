"""Stage borders by exact dynamic programming on time and memory.

Segments of a model, which have no borders inside, are grouped into contiguous stages. The memory of
a stage depends on its place in the pipeline, which determines its microbatches in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from profiles.errors import PlanError

Amounts = Sequence[float] | NDArray[np.float64]
Matrix = NDArray[np.float64]
"""[i, j]: of a stage of segments i, ..., j - 1; n + 1 rows and columns for n segments."""

# Sums of seconds in another order differ in the last digits: such times count as equal.
_ROUNDING = 1e-9


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


def spans(amounts: Amounts) -> Matrix:
    """Sums over contiguous segments.

    >>> spans([1.0, 2.0])[0].tolist()
    [0.0, 1.0, 3.0]
    """
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(amounts, dtype=float))])
    return np.asarray(sums[None, :] - sums[:, None])


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
    # Stage k begins at segment k or later, as stages before it have at least one segment each, and
    # leaves one for each stage after it: a window of the matrix.
    spare = segments - stages + 1
    windows = [(slice(k, k + spare), slice(k + 1, k + 1 + spare)) for k in range(stages)]
    # Stages have at least one segment: there are none on and below the diagonal.
    is_stage = np.triu(np.ones(seconds.shape, dtype=bool), 1)
    seconds = np.where(is_stage, seconds, np.inf)
    resident = np.where(is_stage, resident, np.inf)
    nbytes = [resident[w] + n * saved[w] for n, w in zip(in_flight, windows, strict=True)]
    within = [
        np.where(one <= usable_bytes, seconds[w], np.inf)
        for one, w in zip(nbytes, windows, strict=True)
    ]
    fastest, starts = _least(within)
    if fastest < np.inf:
        limit = fastest * (1 + _ROUNDING)
        even = [
            np.where(times <= limit, one, np.inf) for times, one in zip(within, nbytes, strict=True)
        ]
        _, starts = _least(even)
    else:
        _, starts = _least(nbytes)
    bounds = list(pairwise([0, *starts, segments]))
    return StageCut(
        starts=tuple(starts),
        seconds=float(max(seconds[i, j] for i, j in bounds)),
        nbytes=float(
            max(
                resident[i, j] + n * saved[i, j]
                for n, (i, j) in zip(in_flight, bounds, strict=True)
            )
        ),
    )


def _least(costs: Sequence[Matrix]) -> tuple[float, list[int]]:
    """Cut with the smallest largest cost: that cost, and the first segments of stages 1, 2, ...

    Entry [i, j] of stage k is the cost of segments k + i, ..., k + j.
    """
    columns = np.arange(len(costs[0]))
    best = costs[0][0]
    before = []
    for cost in costs[1:]:
        reached = np.maximum(best[:, None], cost)
        before.append(reached.argmin(axis=0))
        best = reached[before[-1], columns]
    end, starts = len(columns) - 1, []
    for stage, choice in reversed(list(enumerate(before, 1))):
        end = int(choice[end])
        starts.append(stage + end)
    return float(best[-1]), starts[::-1]
