"""Simulation of a pipeline's round: end time and idle time of each rank.

Stages may be unequal. An action begins when its rank is free and its input has arrived, so a round
is a longest path, not a bubble fraction. Exact closed forms are used if available; other schedules
are simulated action by action.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from advisor.cost.stages.orders import FULL_AFTER, PassKind, orders, rank_of, stages_of
from advisor.cost.stages.orders import Action as Action
from advisor.cost.stages.orders import moments as moments
from engines.plan import Schedule


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of every stage for one microbatch, in model order.

    Attributes:
        forward_s: of a forward.
        backward_s: of a backward; of the inputs' gradients alone, if the schedule splits it.
        weight_s: of the weights' gradients; zeros if backwards are not split.
        send_s: from each stage to the next, and as long back; one less than stages.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    send_s: tuple[float, ...]

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds of a stage, forward and backward."""
        parts = zip(self.forward_s, self.backward_s, self.weight_s, strict=True)
        return tuple(sum(part) for part in parts)


@dataclass(frozen=True, slots=True)
class Played:
    """Simulated round of a pipeline.

    Attributes:
        wall_s: from the first forward to the end of the last rank.
        end_s: when each rank has done its last action.
        busy_s: seconds that each rank computes.
    """

    wall_s: float
    end_s: tuple[float, ...]
    busy_s: tuple[float, ...]

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Idle seconds of each rank, including the wait for the end."""
        return tuple(self.wall_s - busy for busy in self.busy_s)


class ActionSpan(NamedTuple):
    """Start and end of an action on a rank, in seconds since the round began."""

    rank: int
    action: Action
    start_s: float
    end_s: float


def sends_late(schedule: Schedule) -> bool:
    """Return True if a transfer begins only when its receiver is idle.

    torch's schedules of one stage a rank post a receive right before the action that needs it, so
    every transfer is waited for (`_wait_batch_p2p` in ScheduleGPipe and Schedule1F1B). The others
    post all receives ahead.
    """
    return schedule not in _RECEIVES_AHEAD


_RECEIVES_AHEAD = (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE, Schedule.ZBV)


@lru_cache(maxsize=1024)
def play(
    schedule: Schedule, times: StageTimes, *, ranks: int, microbatches: int, waits: bool
) -> Played:
    """Simulate one round of `microbatches` over `ranks`.

    Args:
        waits: ranks are idle while they receive (see `sends_late`); else transfers overlap with
            compute.
    """
    stages, busy_s = len(times.forward_s), times.busy_s
    busy = tuple(
        microbatches * sum(busy_s[stage] for stage in own)
        for own in (stages_of(schedule, rank, ranks=ranks, stages=stages) for rank in range(ranks))
    )
    if schedule is Schedule.NAIVE:
        end = _naive(times, microbatches)
    elif schedule is Schedule.GPIPE:
        end = _gpipe(times, microbatches, waits=waits)
    elif schedule is Schedule.ONE_F_ONE_B:
        end = _one_f_one_b(times, microbatches, waits=waits)
    else:
        end = _by_orders(schedule, times, ranks=ranks, microbatches=microbatches, waits=waits)
    return Played(max(end), end, busy)


def timeline(
    schedule: Schedule, times: StageTimes, *, ranks: int, microbatches: int, waits: bool
) -> tuple[ActionSpan, ...]:
    """Actions of the round that `play` simulates, in topological order."""
    shape = {"ranks": ranks, "stages": len(times.forward_s), "microbatches": microbatches}
    path = _path(schedule, **shape)
    todo = [iter(order) for order in orders(schedule, **shape)]
    seconds = (*times.forward_s, *times.backward_s, *times.weight_s)
    _, ends = _replayed(path, times, ranks, waits=waits)
    return tuple(
        ActionSpan(rank, next(todo[rank]), end - seconds[work], end)
        for (rank, work, _, _), end in zip(path, ends, strict=True)
    )


def _naive(times: StageTimes, microbatches: int) -> tuple[float, ...]:
    """One microbatch at a time: a rank is done when its last gradient arrives."""
    forward = sum(times.forward_s) + sum(times.send_s)
    backward = _backward_ends(times)
    return tuple((microbatches - 1) * (forward + backward[0]) + forward + end for end in backward)


def _backward_ends(times: StageTimes) -> list[float]:
    """Seconds from the end of the last forward to the end of each stage's backward."""
    after = [0.0, *reversed(times.send_s)]
    steps = [b + send for b, send in zip(reversed(times.backward_s), after, strict=True)]
    return list(accumulate(steps))[::-1]


def _gpipe(times: StageTimes, microbatches: int, *, waits: bool) -> tuple[float, ...]:
    """A flow shop in each direction: the last job leaves machine n after one pass through all
    machines up to it, and m - 1 times the slowest of them."""

    def through(seconds: Sequence[float], sends: Sequence[float]) -> list[float]:
        arrive = [0.0, *sends]
        whole = [one + (send if waits else 0.0) for one, send in zip(seconds, arrive, strict=True)]
        passed = accumulate(one + send for one, send in zip(seconds, arrive, strict=True))
        slowest = accumulate(whole, max)
        return [p + (microbatches - 1) * s for p, s in zip(passed, slowest, strict=True)]

    forward = through(times.forward_s, times.send_s)
    backward = through(times.backward_s[::-1], times.send_s[::-1])[::-1]
    return tuple(forward[-1] + seconds for seconds in backward)


def _one_f_one_b(times: StageTimes, microbatches: int, *, waits: bool) -> tuple[float, ...]:
    """Forward i of stage s at tick s + 2i, its backward at tick 2p - 1 - s + 2i: a neighbor's
    result is always from the previous tick, so one number per rank suffices.

    Where two ticks move all ranks by the same time, all further ones do until forwards run out.
    """
    forward, backward = times.forward_s, times.backward_s
    count, last = len(forward), len(forward) - 1
    if len(set(forward)) == len(set(backward)) == 1 and not any(times.send_s):
        # One pass per microbatch, and one through the other stages: (m + p - 1)(f + b).
        ends = (microbatches + last - rank for rank in range(count))
        rest = [rank * forward[0] for rank in range(count)]
        return tuple(n * (forward[0] + backward[0]) + r for n, r in zip(ends, rest, strict=True))
    from_before, from_after = (0.0, *times.send_s), (*times.send_s, 0.0)
    before = [send if waits else 0.0 for send in from_before]
    after = [send if waits else 0.0 for send in from_after]
    end = [0.0] * count
    tick, ticks = 0, 2 * (microbatches + last)
    full, dry = 2 * count, 2 * microbatches - 1  # all ranks work at every tick in between
    while tick < ticks:
        earlier = end if full <= tick < dry and tick % 2 == 0 else None
        for _ in range(2):
            fresh = end.copy()
            low = tick - 2 * (microbatches - 1)
            for s in range(max(low, tick % 2), min(tick, last) + 1, 2):
                start = end[s]
                if s and waits:
                    start = max(start, end[s - 1]) + before[s]
                elif s:
                    start = max(start, end[s - 1] + from_before[s])
                fresh[s] = start + forward[s]
            low = 2 * count - 1 - tick
            for s in range(
                max(low, (tick + 1) % 2), min(low + 2 * (microbatches - 1), last) + 1, 2
            ):
                start = end[s]
                if s < last and waits:
                    start = max(start, end[s + 1]) + after[s]
                elif s < last:
                    start = max(start, end[s + 1] + from_after[s])
                fresh[s] = start + backward[s]
            end = fresh
            tick += 1
        if earlier is not None:
            moved = [now - then for now, then in zip(end, earlier, strict=True)]
            if max(moved) - min(moved) <= 1e-12 * max(end):
                pairs = (dry - tick) // 2
                if pairs > 0:
                    end = [now + pairs * by for now, by in zip(end, moved, strict=True)]
                    tick += 2 * pairs
    return tuple(end)


def _by_orders(
    schedule: Schedule, times: StageTimes, *, ranks: int, microbatches: int, waits: bool
) -> tuple[float, ...]:
    """Exact up to eight microbatches per rank. Beyond that, every further `ranks` microbatches take
    as long as the last ones: within 2 % if stages differ twofold and sends take as long as
    forwards."""

    def played(count: int) -> tuple[float, ...]:
        path = _path(schedule, ranks=ranks, stages=len(times.forward_s), microbatches=count)
        return _replayed(path, times, ranks, waits=waits)[0]

    shown = 2 * FULL_AFTER * ranks + microbatches % ranks
    if microbatches <= shown:
        return played(microbatches)
    long, short = played(shown), played(shown - ranks)
    more = (microbatches - shown) // ranks
    return tuple(a + more * (a - b) for a, b in zip(long, short, strict=True))


_Path = tuple[tuple[int, int, int, int], ...]
"""(rank, work, needs, border) of every action, each after those that it depends on.

`work` is its index among the seconds of all stages, `needs` the index of the action whose result it
uses (-1: none), sent over the border before stage `border` (0: not sent, both stages are on one
rank).
"""


@lru_cache(maxsize=256)
def _path(schedule: Schedule, *, ranks: int, stages: int, microbatches: int) -> _Path:
    queues = orders(schedule, ranks=ranks, stages=stages, microbatches=microbatches)
    home = [rank_of(schedule, stage, ranks=ranks, stages=stages) for stage in range(stages)]
    before = [n if n and home[n] != home[n - 1] else 0 for n in range(stages)]
    after = [n if home[n] != home[n - 1] else 0 for n in range(1, stages)]
    # The action that made a stage's output for a microbatch, or the gradient of its input.
    outputs, gradients = ([[_OPEN] * microbatches for _ in range(stages)] for _ in range(2))
    at = [0] * ranks
    path: list[tuple[int, int, int, int]] = []
    left = list(range(ranks))
    while left:
        for rank in left:
            queue, place = queues[rank], at[rank]
            while place < len(queue):
                kind, stage, microbatch = queue[place]
                needs, border = -1, 0
                if kind is PassKind.FORWARD:
                    if stage:
                        needs, border = outputs[stage - 1][microbatch], before[stage]
                elif kind is not PassKind.WEIGHT and stage < stages - 1:
                    needs, border = gradients[stage + 1][microbatch], after[stage]
                if needs == _OPEN:
                    break
                if kind is PassKind.FORWARD:
                    outputs[stage][microbatch] = len(path)
                elif kind is not PassKind.WEIGHT:
                    gradients[stage][microbatch] = len(path)
                path.append((rank, _WORK[kind] * stages + stage, needs, border))
                place += 1
            at[rank] = place
        left = [rank for rank in left if at[rank] < len(queues[rank])]
    return tuple(path)


_OPEN = -2  # no action has made it yet
_WORK = {PassKind.FORWARD: 0, PassKind.BACKWARD: 1, PassKind.INPUT: 1, PassKind.WEIGHT: 2}


def _replayed(
    path: _Path, times: StageTimes, ranks: int, *, waits: bool
) -> tuple[tuple[float, ...], list[float]]:
    """End time of each rank, and of each action."""
    seconds = (*times.forward_s, *times.backward_s, *times.weight_s)
    sends = (0.0, *times.send_s)
    free = [0.0] * ranks
    end: list[float] = []
    note = end.append
    for rank, work, needs, border in path:
        start = free[rank]
        if needs >= 0:
            if waits:
                start = max(start, end[needs]) + sends[border]
            else:
                arrived = end[needs] + sends[border]
                start = arrived if arrived > start else start
        start += seconds[work]
        free[rank] = start
        note(start)
    return tuple(free), end
