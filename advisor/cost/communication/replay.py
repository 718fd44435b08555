"""Overlap by replay: one step on a compute queue and communication queues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from advisor.cost.communication.exchange import Exchange
from advisor.cost.compute.unit_times import UnitTime
from engines.plan import DataParallel, Plan
from profiles.machine.cluster import Overlap
from profiles.provenance import Quantity, Source

# Compute and communication slow each other by 1.1 to 1.3 while they overlap (Galvatron), unless
# measured. Assumed equal for both.
USUAL_SLOWDOWN = Quantity(value=1.2, source=Source.ASSUMED, relative_error=0.1 / 1.2)
USUAL_OVERLAP = Overlap(computing=USUAL_SLOWDOWN, communication=USUAL_SLOWDOWN)


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Seconds that a second of overlap adds to a step; they count as exposed."""

    low: float
    middle: float
    high: float


def slowdown(overlap: Overlap | None, *, computing_s: float, sent_s: float) -> Slowdown:
    """Cost of overlap, for `computing_s` and `sent_s` measured alone.

    Let the longer one take l times as long while they overlap, the other one o times. A second of
    the other one then lasts o seconds, in which the longer one does o / l of its own work: the step
    is longer by o - o / l.
    """
    factors = overlap or USUAL_OVERLAP
    longer, other = factors.computing, factors.communication
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
class StepReplay:
    """Replayed forwards and backwards of one step. `wall_s` = computing + exposed."""

    wall_s: float
    sent_s: float


def replay(
    plan: Plan, times: Sequence[UnitTime], exchanged: Exchange, *, overlaps: bool
) -> StepReplay:
    """Replay all microbatches of a step on one compute and two communication queues.

    FSDP2 prefetches one unit ahead and reduces behind; all-reduces between replicas have a queue of
    their own. Without overlap (gloo's threads share the cores) everything takes its turn.
    """
    kind = plan.data_parallel
    count, once = plan.forwards, kind in (DataParallel.ZERO1, DataParallel.ZERO2)
    every = kind is not DataParallel.ZERO1
    mode = {"overlaps": overlaps}
    first = forward(times, exchanged, gathers=True, **mode)
    last = backward(times, exchanged, gathers=not once, reduces=True, replicates=True, **mode)
    if count == 1:
        return StepReplay(first.wall_s + last.wall_s, first.sent_s + last.sent_s)
    later = forward(times, exchanged, gathers=not once, **mode)
    middle = backward(times, exchanged, gathers=not once, reduces=every, replicates=False, **mode)
    return StepReplay(
        wall_s=first.wall_s + last.wall_s + (count - 1) * (later.wall_s + middle.wall_s),
        sent_s=first.sent_s + last.sent_s + (count - 1) * (later.sent_s + middle.sent_s),
    )


def forward(
    times: Sequence[UnitTime],
    exchanged: Exchange,
    *,
    gathers: bool,
    overlaps: bool,
) -> StepReplay:
    """Replay one microbatch's forward through all units."""
    tensor_s = exchanged.tensor_forward_s
    seconds = [
        t.forward_s + t.forward_launch_s + sent for t, sent in zip(times, tensor_s, strict=True)
    ]
    inside = _sum(times, tensor_s)
    if not gathers:
        return StepReplay(_sum(times, seconds), inside)
    sent = exchanged.root_gather_s + _sum(times, exchanged.gather_s)
    if not overlaps:
        return StepReplay(_sum(times, seconds) + sent, sent + inside)
    steps = [
        _Steps(time.count, busy, gather)
        for time, busy, gather in zip(times, seconds, exchanged.gather_s, strict=True)
    ]
    queues = _Queues(exchanged.root_gather_s, exchanged.root_gather_s, 0.0, 0.0)
    return StepReplay(_through(steps, queues).clock, sent + inside)


def backward(
    times: Sequence[UnitTime],
    exchanged: Exchange,
    *,
    gathers: bool,
    reduces: bool,
    replicates: bool,
    overlaps: bool,
) -> StepReplay:
    """Replay one microbatch's backward through all units, last to first."""
    tensor_s = [
        sent + again
        for sent, again in zip(exchanged.tensor_backward_s, exchanged.tensor_again_s, strict=True)
    ]
    seconds = [
        t.backward_s + t.backward_launch_s + t.recompute_s + t.recompute_launch_s + sent
        for t, sent in zip(times, tensor_s, strict=True)
    ]
    zeros = (0.0,) * len(times)
    gather_s = exchanged.gather_s if gathers else zeros
    reduce_s = exchanged.reduce_s if reduces else zeros
    replicate_s = exchanged.replicate_s if replicates else zeros
    root_reduce = exchanged.root_reduce_s if reduces else 0.0
    root_replicate = exchanged.root_replicate_s if replicates else 0.0
    sent = sum(_sum(times, each) for each in (gather_s, reduce_s, replicate_s))
    sent += root_reduce + root_replicate
    inside = _sum(times, tensor_s)
    if not overlaps:
        return StepReplay(_sum(times, seconds) + sent, sent + inside)
    order = range(len(times) - 1, -1, -1)
    steps = [
        _Steps(times[i].count, seconds[i], gather_s[i], reduce_s[i], replicate_s[i]) for i in order
    ]
    queues = _through(steps, _Queues(0.0, 0.0, 0.0, 0.0))
    queue = queues.queue + root_reduce
    return StepReplay(max(queues.between, queue) + root_replicate, sent + inside)


def _sum(times: Sequence[UnitTime], seconds: Sequence[float]) -> float:
    return sum(time.count * each for time, each in zip(times, seconds, strict=True))


class _Steps(NamedTuple):
    """Equal units in sequence: compute, gather before, and reduction after each."""

    units: int
    busy_s: float
    gather_s: float
    reduce_s: float = 0.0
    replicate_s: float = 0.0


class _Queues(NamedTuple):
    """Times at which the compute, shard and replica queues are free, and the last gather ends."""

    clock: float
    queue: float
    between: float
    ready: float


def _through(steps: Sequence[_Steps], start: _Queues) -> _Queues:
    """Replay units in order, prefetching the next. Equal units are replayed only until each
    advances all queues by the same time."""
    following = [0.0] * len(steps)
    latest = 0.0
    for i in range(len(steps) - 1, -1, -1):
        following[i] = latest
        latest = steps[i].gather_s or latest
    now = start
    if latest:
        ready = now.queue + latest
        now = now._replace(queue=ready, ready=ready)
    for step, after in zip(steps, following, strict=True):
        left = step.units - 1
        while left:
            then = now
            now = _after(step, now, following=step.gather_s or after)
            left -= 1
            moved = now.clock - then.clock
            if left and all(
                abs(b - a - moved) <= 1e-12 * b for a, b in zip(then, now, strict=True)
            ):
                now = _Queues(*(each + left * moved for each in now))
                left = 0
        now = _after(step, now, following=after)
    return now


def _after(step: _Steps, now: _Queues, *, following: float) -> _Queues:
    clock, queue, between, ready = now
    if step.gather_s:
        clock = ready
        queue += following
        ready = queue
    clock += step.busy_s
    if step.reduce_s:
        queue = max(queue, clock) + step.reduce_s
    if step.replicate_s:
        between = max(between, queue if step.reduce_s else clock) + step.replicate_s
    # Nothing begins before this time any more, so idle queues advance to it.
    return _Queues(clock, max(queue, clock), max(between, clock), max(ready, clock))
