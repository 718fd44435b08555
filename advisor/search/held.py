"""What the fullest rank of a pipeline holds, whose stages are known.

A rank is asked at every moment of its schedule that no other one exceeds: which microbatches it
keeps of each of its stages, and which of them wait for their weights. What is found is never above
`advisor.cost.stage_memory`, which asks all ranks and looks inside stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from advisor.cost.orders import SPLITS_BACKWARD, Kind, moments_of, stages_of
from advisor.search.pieces import Floats, Pieces
from engines.plan import Plan, Schedule

Integers = NDArray[np.int64]


def fullest_bytes(
    plan: Plan,
    pieces: Pieces,
    starts: Sequence[int],
    *,
    always: Floats,
    whole: frozenset[int],
) -> float:
    """Of the rank that holds most among those that are asked, beside what all ranks hold alike.

    Args:
        starts: the first piece of stages 1, 2, ...
        always: bytes of each piece that its rank holds all through a round.
        whole: stages whose backward is not split, as `moments` has it.
    """
    assert plan.schedule is not None
    firsts, borders = [0, *starts], [0, *starts, len(pieces.kept)]

    def summed(amounts: Floats) -> Floats:
        return np.asarray(np.add.reduceat(amounts, firsts))

    in_round = 1 if plan.schedule is Schedule.NAIVE else plan.microbatches
    found = _counts(plan.schedule, plan.pp, len(firsts), in_round, whole)
    there, back = pieces.there[borders], pieces.back[borders]
    received = there[:-1] + back[1:]
    if plan.schedule in SPLITS_BACKWARD:
        splits = [stage > 0 and stage not in whole for stage in range(len(firsts))]
        received = received + back[:-1] * splits
    own, kept = summed(always), summed(pieces.kept)
    if pieces.keeps_messages:
        own = own + in_round * received
        # What a microbatch received stays where it was received into; what it sends on is held.
        kept = kept - np.minimum(kept, there[:-1]) + there[1:]
    kept += summed(pieces.cast) * (not plan.data_parallel.is_sharded)
    waiting = summed(pieces.layers)
    work = pieces.work_bytes(plan)[np.array(borders[1:]) - 1]
    held = found.held * kept[found.own] + found.late * waiting[found.own] + own[found.own]
    return float((held.sum(axis=1) + work[found.working] * found.is_backward).max())


@dataclass(frozen=True, slots=True)
class _Counts:
    """The moments of all ranks, one after the other.

    Attributes:
        own: [moment, chunk], the stages of its rank; of each it has `held` microbatches, of which
            `late` wait for their weights.
        working: the stage whose action begins.
    """

    own: Integers
    held: Integers
    late: Integers
    working: Integers
    is_backward: NDArray[np.bool_]


# Ranks are asked at both ends of the pipeline, where embeddings, logits and most microbatches are.
_FROM_EACH_END = 2


@lru_cache(maxsize=256)
def _counts(
    schedule: Schedule, ranks: int, stages: int, microbatches: int, whole: frozenset[int]
) -> _Counts:
    shape = {"ranks": ranks, "stages": stages}
    asked = {*range(ranks)[:_FROM_EACH_END], *range(ranks)[-_FROM_EACH_END:]}
    every = [
        (stages_of(schedule, rank, **shape), moment)
        for rank in sorted(asked)
        for moment in moments_of(schedule, rank, **shape, microbatches=microbatches, whole=whole)
    ]
    return _Counts(
        own=np.array([own for own, _ in every]),
        held=np.array([moment.held for _, moment in every]),
        late=np.array([moment.waiting for _, moment in every]),
        working=np.array([own[moment.chunk] for own, moment in every]),
        is_backward=np.array([moment.kind is not Kind.FORWARD for _, moment in every]),
    )
