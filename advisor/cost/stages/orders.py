"""Order of forwards and backwards on the ranks of a pipeline, for each schedule.

As in torch.distributed.pipelining (2.13), which the engine runs; a test compares the orders with
torch's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import lru_cache
from operator import ge
from typing import NamedTuple

from engines.plan import Schedule


class PassKind(StrEnum):
    """Computation of an action, in torch's letters."""

    FORWARD = "F"
    BACKWARD = "B"  # gradients of inputs and of weights
    INPUT = "I"  # gradients of inputs alone, which the previous stage needs
    WEIGHT = "W"  # gradients of weights, at any later time


class Action(NamedTuple):
    """A stage's computation for one microbatch."""

    kind: PassKind
    stage: int
    microbatch: int


Order = tuple[Action, ...]
"""Actions of one rank, first to last."""

ONE_STAGE = (Schedule.NAIVE, Schedule.GPIPE, Schedule.ONE_F_ONE_B)
"""Schedules whose ranks have one stage each."""
SPLITS_BACKWARD = (Schedule.ZERO_BUBBLE, Schedule.ZBV)
"""Schedules that split a backward into the gradients of inputs and those of weights."""


def rank_of(schedule: Schedule, stage: int, *, ranks: int, stages: int) -> int:
    """Rank of a stage: cyclic; under ZBV a V over the ranks."""
    if schedule is Schedule.ZBV:
        return min(stage, stages - 1 - stage)
    return stage % ranks


def stages_of(schedule: Schedule, rank: int, *, ranks: int, stages: int) -> tuple[int, ...]:
    """Stages of a rank, in model order."""
    if schedule is Schedule.ZBV:
        return rank, stages - 1 - rank
    return tuple(range(rank, stages, ranks))


@lru_cache(maxsize=256)
def orders(schedule: Schedule, *, ranks: int, stages: int, microbatches: int) -> tuple[Order, ...]:
    """Order of each rank's actions in one round; without idle slots.

    The naive schedule runs `microbatches` one after the other.

    Args:
        stages: of the whole pipeline: a multiple of `ranks`, twice as many under ZBV.
        microbatches: of a round: a multiple of `ranks` where a rank has several stages.
    """
    shape = {"ranks": ranks, "stages": stages, "microbatches": microbatches}
    return tuple(order_of(schedule, rank, **shape) for rank in range(ranks))


def order_of(schedule: Schedule, rank: int, *, ranks: int, stages: int, microbatches: int) -> Order:
    """Order of one rank's actions."""
    match schedule:
        case Schedule.NAIVE:
            return tuple(_naive(rank, microbatches))
        case Schedule.GPIPE:
            return tuple(_gpipe(rank, microbatches))
        case Schedule.ONE_F_ONE_B:
            return tuple(_one_f_one_b(rank, ranks, microbatches))
        case Schedule.ZBV:
            return tuple(_zbv(rank, ranks, microbatches))
    splits = schedule is Schedule.ZERO_BUBBLE
    return tuple(_rounds(rank, ranks, stages // ranks, microbatches, splits=splits))


def _naive(rank: int, microbatches: int) -> Iterator[Action]:
    for microbatch in range(microbatches):
        yield Action(PassKind.FORWARD, rank, microbatch)
        yield Action(PassKind.BACKWARD, rank, microbatch)


def _gpipe(rank: int, microbatches: int) -> Iterator[Action]:
    for kind in (PassKind.FORWARD, PassKind.BACKWARD):
        for microbatch in range(microbatches):
            yield Action(kind, rank, microbatch)


def _one_f_one_b(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    ahead = min(microbatches, ranks - rank)
    for microbatch in range(ahead):
        yield Action(PassKind.FORWARD, rank, microbatch)
    for microbatch in range(microbatches):
        yield Action(PassKind.BACKWARD, rank, microbatch)
        if microbatch + ahead < microbatches:
            yield Action(PassKind.FORWARD, rank, microbatch + ahead)


def _rounds(
    rank: int, ranks: int, chunks: int, microbatches: int, *, splits: bool
) -> Iterator[Action]:
    """Interleaved 1F1B (arXiv:2104.04473), and ZB1P (arXiv:2401.10241) where backwards are split.

    A rank takes the microbatches of a round through one of its stages, then through the next. Zero
    bubble warms up half as long, and computes weight gradients `rank` backwards late.
    """
    per_round = microbatches // max(1, microbatches // ranks)
    total = chunks * microbatches
    hops = (1 if splits else 2) * (ranks - 1 - rank)
    warm_up = min((chunks - 1) * per_round + hops, total)
    kind, last = PassKind.INPUT if splits else PassKind.BACKWARD, chunks - 1
    steps = _steps(per_round, chunks, total)
    forwards = [Action(PassKind.FORWARD, chunk * ranks + rank, which) for chunk, which in steps]
    backwards = [Action(kind, (last - chunk) * ranks + rank, which) for chunk, which in steps]
    weights = [Action(PassKind.WEIGHT, stage, which) for _, stage, which in backwards if splits]
    yield from forwards[:warm_up]
    for step, backward in enumerate(backwards):
        if step + warm_up < total:
            yield forwards[step + warm_up]
        yield backward
        if splits and step >= rank:
            yield weights[step - rank]
    yield from weights[max(0, total - rank) :]


@lru_cache(maxsize=64)
def _steps(per_round: int, chunks: int, total: int) -> tuple[tuple[int, int], ...]:
    """(Stage of the rank, microbatch) of each forward; backwards begin with the last stage."""
    places = (divmod(step, per_round) for step in range(total))
    return tuple((block % chunks, block // chunks * per_round + offset) for block, offset in places)


def _zbv(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """ZB-V (arXiv:2401.10241, section 6): two stages a rank; the first rank has the first and
    last."""
    down, up = rank, 2 * ranks - 1 - rank
    wanted = max(2 * ranks - 1, microbatches)  # surplus is dropped below
    done = {(kind, stage): 0 for kind in PassKind for stage in (down, up)}
    order: list[Action] = []

    def run(kind: PassKind, stage: int) -> None:
        if done[kind, stage] < microbatches:
            order.append(Action(kind, stage, done[kind, stage]))
        done[kind, stage] += 1

    def backward(stage: int) -> None:
        run(PassKind.INPUT, stage)
        run(PassKind.WEIGHT, stage)

    for _ in range(2 * (ranks - rank) - 1):
        run(PassKind.FORWARD, down)
    for _ in range(rank):
        run(PassKind.FORWARD, up)
        run(PassKind.FORWARD, down)
    for _ in range(ranks - rank):
        run(PassKind.FORWARD, up)
        backward(up)
    while (
        done[PassKind.FORWARD, up] < done[PassKind.FORWARD, down]
        or done[PassKind.FORWARD, down] < wanted
    ):
        if done[PassKind.FORWARD, down] < wanted:
            run(PassKind.FORWARD, down)
        backward(down)
        run(PassKind.FORWARD, up)
        backward(up)
    for _ in range(rank):
        run(PassKind.INPUT, down)
        run(PassKind.INPUT, up)
    for _ in range(ranks - rank):
        backward(down)
    for stage in (up, down):
        while done[PassKind.WEIGHT, stage] < done[PassKind.INPUT, stage]:
            run(PassKind.WEIGHT, stage)
    yield from order


class InFlight(NamedTuple):
    """Microbatches in flight on a rank when an action begins.

    Attributes:
        kind, chunk: of the action; `chunk` counts the stages of the rank.
        saved: for every chunk, microbatches whose activations are saved: their forward is done,
            their backward is not.
        waiting: those of them that lack only the gradients of weights.
        has_gradients: for every chunk, whether an earlier microbatch of the round made gradients of
            its weights.
    """

    kind: PassKind
    chunk: int
    saved: tuple[int, ...]
    waiting: tuple[int, ...]
    has_gradients: tuple[bool, ...]


Counts = tuple[int, ...]
"""All of a rank that takes memory: `saved`, `waiting` and `has_gradients` of every chunk."""


def moments(
    schedule: Schedule,
    *,
    ranks: int,
    stages: int,
    microbatches: int,
    whole: frozenset[int] = frozenset(),
) -> tuple[tuple[InFlight, ...], ...]:
    """Fullest moments of a round for every rank: see `moments_of`."""
    shape = {"ranks": ranks, "stages": stages, "microbatches": microbatches}
    return tuple(moments_of(schedule, rank, **shape, whole=whole) for rank in range(ranks))


@lru_cache(maxsize=8192)
def moments_of(
    schedule: Schedule,
    rank: int,
    *,
    ranks: int,
    stages: int,
    microbatches: int,
    whole: frozenset[int] = frozenset(),
) -> tuple[InFlight, ...]:
    """Fullest moments of a round on one rank: those not dominated in every chunk by another one of
    the same action.

    Args:
        whole: stages whose backward is never split: it runs when the inputs' gradients are due.
    """
    if schedule in ONE_STAGE:
        fullest = _fullest(schedule, rank, ranks, microbatches)
        return tuple(InFlight(kind, 0, (saved,), (0,), (made,)) for kind, saved, made in fullest)
    # In-flight counts are periodic once the pipeline is full.
    shown = min(microbatches, FULL_AFTER * ranks)
    order = order_of(schedule, rank, ranks=ranks, stages=stages, microbatches=shown)
    own = stages_of(schedule, rank, ranks=ranks, stages=stages)
    return tuple(_undominated(_moments(order, own, whole), len(own)))


FULL_AFTER = 4
"""Microbatches per rank after which every schedule has filled the pipeline: warm-ups are at most
two microbatches per rank and stage, and a stage takes `ranks` of them before the next one does."""


def _fullest(
    schedule: Schedule, rank: int, ranks: int, microbatches: int
) -> Iterator[tuple[PassKind, int, bool]]:
    """Microbatches in flight, and whether there are gradients of an earlier one."""
    in_flight = {
        Schedule.NAIVE: 1,
        Schedule.GPIPE: microbatches,
        Schedule.ONE_F_ONE_B: min(microbatches, ranks - rank),
    }[schedule]
    is_steady = microbatches > in_flight  # as many when the second backward begins
    yield PassKind.FORWARD, in_flight - 1, is_steady
    yield PassKind.BACKWARD, in_flight, is_steady
    if 1 < in_flight == microbatches:
        yield PassKind.BACKWARD, in_flight - 1, True


def _moments(
    order: Order, own: Sequence[int], whole: frozenset[int]
) -> Iterator[tuple[PassKind, int, Counts]]:
    """Yield the kind and the chunk of every action, and the counts when it begins."""
    chunks = {stage: chunk for chunk, stage in enumerate(own)}
    counts = [0] * len(own) + [0] * len(own) + [False] * len(own)
    waiting, made = len(own), 2 * len(own)  # places of the first chunk's
    for kind, stage, _ in order:
        chunk = chunks[stage]
        is_whole = stage in whole
        if not (kind is PassKind.WEIGHT and is_whole):
            yield kind, chunk, tuple(counts)
        if kind is PassKind.FORWARD:
            counts[chunk] += 1
        elif kind is PassKind.BACKWARD or (kind is PassKind.INPUT and is_whole):
            counts[chunk] -= 1
            counts[made + chunk] = True
        elif kind is PassKind.INPUT:
            counts[waiting + chunk] += 1
        elif not is_whole:
            counts[chunk] -= 1
            counts[waiting + chunk] -= 1
            counts[made + chunk] = True


def _undominated(
    candidates: Iterator[tuple[PassKind, int, Counts]], chunks: int
) -> Iterator[InFlight]:
    by_action: dict[tuple[PassKind, int], dict[Counts, None]] = {}
    for kind, chunk, counts in candidates:
        by_action.setdefault((kind, chunk), {})[counts] = None
    for (kind, chunk), of_action in by_action.items():
        undominated: list[Counts] = []
        # Sorted by sum, a dominating entry comes first.
        for counts in sorted(of_action, key=sum, reverse=True):
            if not any(all(map(ge, other, counts)) for other in undominated):
                undominated.append(counts)
                saved, waiting = counts[:chunks], counts[chunks : 2 * chunks]
                made = tuple(map(bool, counts[2 * chunks :]))
                yield InFlight(kind, chunk, saved, waiting, made)
