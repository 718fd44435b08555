"""Overlap by replay: one step on a computing queue and communication queues beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from advisor.cost.communication import Exchange
from advisor.cost.compute import UnitTime
from engines.plan import DataParallel, Plan
from profiles.cluster import Overlap
from profiles.provenance import Quantity, Source

# Computing and communication slow each other by 1.1 to 1.3 while they overlap (Galvatron), where
# nobody measured it. Assumed of both alike.
USUAL_SLOWDOWN = Quantity(value=1.2, source=Source.ASSUMED, relative_error=0.1 / 1.2)
USUAL_OVERLAP = Overlap(computing=USUAL_SLOWDOWN, communication=USUAL_SLOWDOWN)


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Seconds that a second of overlap adds to a step; they count as exposed."""

    low: float
    middle: float
    high: float


def slowdown(overlap: Overlap | None, *, computing_s: float, sent_s: float) -> Slowdown:
    """What overlap costs where computing takes `computing_s` alone, communication `sent_s`.

    Let the longer one take l times as long while they overlap, the other one o times. A second of
    the other one then lasts o seconds, in which the longer one does o / l of its own work: the step
    is longer by o - o / l.
    """
    found = overlap or USUAL_OVERLAP
    longer, other = found.computing, found.communication
    if sent_s > computing_s:
        longer, other = other, longer

    def added(of_longer: float, of_other: float) -> float:
        of_longer, of_other = max(1.0, of_longer), max(1.0, of_other)
        return of_other - of_other / of_longer

    return Slowdown(
        low=added(longer.low, other.low),
        middle=added(longer.value, other.value),
        high=added(longer.high, other.high),
    )


@dataclass(frozen=True, slots=True)
class Replay:
    """One step's forwards and backwards played through. `wall_s` = computing + exposed."""

    wall_s: float
    sent_s: float


def replay(plan: Plan, times: Sequence[UnitTime], exchanged: Exchange, *, overlaps: bool) -> Replay:
    """Play all microbatches of a step on one computing and two communication queues.

    FSDP2 prefetches one unit ahead and reduces behind; all-reduces between replicas have a queue of
    their own. Without overlap (gloo's threads share the cores) everything takes its turn.
    """
    kind = plan.data_parallel
    count, once = plan.forwards, kind in (DataParallel.ZERO1, DataParallel.ZERO2)
    every = kind is not DataParallel.ZERO1
    first = _forward(times, exchanged, gathers=True, overlaps=overlaps)
    last = _backward(
        times,
        exchanged,
        gathers=not once,
        reduces=True,
        replicates=True,
        overlaps=overlaps,
    )
    apart = exchanged.apart_s
    if count == 1:
        return Replay(first.wall_s + last.wall_s + apart, first.sent_s + last.sent_s + apart)
    later = _forward(times, exchanged, gathers=not once, overlaps=overlaps)
    middle = _backward(
        times, exchanged, gathers=not once, reduces=every, replicates=False, overlaps=overlaps
    )
    return Replay(
        wall_s=first.wall_s + last.wall_s + (count - 1) * (later.wall_s + middle.wall_s) + apart,
        sent_s=first.sent_s + last.sent_s + (count - 1) * (later.sent_s + middle.sent_s) + apart,
    )


def _forward(
    times: Sequence[UnitTime], exchanged: Exchange, *, gathers: bool, overlaps: bool
) -> Replay:
    computing = sum(t.forward_s + t.forward_launch_s for t in times)
    if not gathers:
        return Replay(computing, 0.0)
    sent = exchanged.root_gather_s + sum(exchanged.gather_s)
    if not overlaps:
        return Replay(computing + sent, sent)
    clock = queue = exchanged.root_gather_s
    ready = _Prefetch(exchanged.gather_s, range(len(times)))
    queue = ready.fetch_next(queue)
    for i, unit in enumerate(times):
        clock = max(clock, ready.at(i))
        if exchanged.gather_s[i]:
            queue = ready.fetch_next(max(queue, clock))
        clock += unit.forward_s + unit.forward_launch_s
    return Replay(clock, sent)


def _backward(
    times: Sequence[UnitTime],
    exchanged: Exchange,
    *,
    gathers: bool,
    reduces: bool,
    replicates: bool,
    overlaps: bool,
) -> Replay:
    seconds = [
        t.backward_s + t.backward_launch_s + t.recompute_s + t.recompute_launch_s for t in times
    ]
    gather_s = exchanged.gather_s if gathers else (0.0,) * len(times)
    reduce_s = exchanged.reduce_s if reduces else (0.0,) * len(times)
    replicate_s = exchanged.replicate_s if replicates else (0.0,) * len(times)
    root_reduce = exchanged.root_reduce_s if reduces else 0.0
    root_replicate = exchanged.root_replicate_s if replicates else 0.0
    sent = sum(gather_s) + sum(reduce_s) + sum(replicate_s) + root_reduce + root_replicate
    if not overlaps:
        return Replay(sum(seconds) + sent, sent)
    clock = queue = between = 0.0
    ready = _Prefetch(gather_s, range(len(times) - 1, -1, -1))
    queue = ready.fetch_next(queue)
    for i in range(len(times) - 1, -1, -1):
        clock = max(clock, ready.at(i))
        if gather_s[i]:
            queue = ready.fetch_next(max(queue, clock))
        clock += seconds[i]
        if reduce_s[i]:
            queue = max(queue, clock) + reduce_s[i]
        if replicate_s[i]:
            between = max(between, queue if reduce_s[i] else clock) + replicate_s[i]
    queue = max(queue, clock) + root_reduce
    between = max(between, queue) + root_replicate
    return Replay(between, sent)


class _Prefetch:
    """Gathers in the order of use, one ahead of the unit in work."""

    def __init__(self, seconds: Sequence[float], order: Sequence[int]) -> None:
        self._seconds = seconds
        self._waiting = iter([i for i in order if seconds[i]])
        self._ready: dict[int, float] = {}

    def fetch_next(self, start: float) -> float:
        """Begin the next gather at `start`; when the queue is free again."""
        i = next(self._waiting, None)
        if i is None:
            return start
        self._ready[i] = start + self._seconds[i]
        return self._ready[i]

    def at(self, i: int) -> float:
        """When unit `i` is whole; 0 for a unit that is never gathered."""
        return self._ready.get(i, 0.0)
