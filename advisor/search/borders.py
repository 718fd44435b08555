"""Borders of stages: exact, by dynamic programming on time and memory.

A row of pieces that no border divides is cut into contiguous stages. Every stage has a time and,
because it holds as many microbatches as its place in the pipeline asks for, a memory of its own.
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
"""[i, j]: of a stage that holds pieces i, ..., j - 1, of n pieces; n + 1 rows and columns."""

# Sums of seconds in another order differ in their last digits: nobody is slower for that.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class StageCut:
    """A row of pieces as stages.

    Attributes:
        starts: the first piece of stages 1, 2, ...
        seconds: of the slowest stage.
        nbytes: of the fullest stage.
    """

    starts: tuple[int, ...]
    seconds: float
    nbytes: float


def spans(amounts: Amounts) -> Matrix:
    """Sums of contiguous pieces.

    >>> spans([1.0, 2.0])[0].tolist()
    [0.0, 1.0, 3.0]
    """
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(amounts, dtype=float))])
    return np.asarray(sums[None, :] - sums[:, None])


def largest(amounts: Amounts) -> Matrix:
    """The largest of contiguous pieces.

    >>> largest([2.0, 1.0])[0].tolist()
    [0.0, 2.0, 2.0]
    """
    count = len(amounts)
    found = np.zeros((count + 1, count + 1))
    for start in range(count):
        found[start, start + 1 :] = np.maximum.accumulate(np.asarray(amounts[start:]))
    return found


def cut(
    seconds: Matrix,
    held: Matrix,
    kept: Matrix,
    *,
    in_flight: Sequence[int],
    usable_bytes: float,
) -> StageCut:
    """The stages whose slowest is fastest, among those where every stage stays within memory.

    Of cuts that are equally fast it takes one whose fullest stage has least, then the one whose
    last stages begin first. Where none stays within memory, the one whose fullest stage has least.

    Args:
        seconds: of every possible stage.
        held: bytes of every possible stage, beside those `kept` for each microbatch in flight.
        in_flight: microbatches at every place in the pipeline: its length is how many stages.

    Raises:
        PlanError: more stages than pieces.
    """
    pieces, stages = len(seconds) - 1, len(in_flight)
    if pieces < stages:
        raise PlanError(
            f"{stages} stages need as many pieces that can be parted, there are {pieces}",
            hints=[f"take at most {pieces} stages"],
        )
    # So many pieces at least are before and behind each stage: what is left of a matrix.
    spare = pieces - stages + 1
    windows = [(slice(k, k + spare), slice(k + 1, k + 1 + spare)) for k in range(stages)]
    # Stages hold at least one piece: on and below the diagonal there is none.
    is_stage = np.triu(np.ones(seconds.shape, dtype=bool), 1)
    seconds = np.where(is_stage, seconds, np.inf)
    held = np.where(is_stage, held, np.inf)
    nbytes = [held[w] + n * kept[w] for n, w in zip(in_flight, windows, strict=True)]
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
    bounds = list(pairwise([0, *starts, pieces]))
    return StageCut(
        starts=tuple(starts),
        seconds=float(max(seconds[i, j] for i, j in bounds)),
        nbytes=float(
            max(held[i, j] + n * kept[i, j] for n, (i, j) in zip(in_flight, bounds, strict=True))
        ),
    )


def _least(costs: Sequence[Matrix]) -> tuple[float, list[int]]:
    """The cut whose largest cost is least: its value, and the first pieces of stages 1, 2, ...

    Of stage k [i, j]: it holds pieces k + i, ..., k + j.
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
