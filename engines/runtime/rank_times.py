"""Computing and waiting times of ranks in a step: which rank the others wait for.

A step synchronises all ranks twice: before the forward, where the rows of the batch are counted,
and at the end of the exchange of gradients. A rank's own time is that before it has to wait:
computing, up to its last gradient, and all that happens between steps (loading data, the update).
Under FSDP2 ranks wait for each other unit by
unit, so there its own time is that of the units' forwards, between gather and release.

It reads the clock twice a step, or a unit. On CUDA computing is timed by events in the stream.
Ranks compare their times when a training is long enough to be saved, and then ever more rarely.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from engines.plan import Plan
from engines.runtime.steps import MOST_STEPS, WARM_UP_STEPS
from engines.runtime.world import World, sum_over_ranks
from profiles.errors import InputError, PlanError
from profiles.model.profile import ModelProfile
from profiles.timing.straggler_stats import EVEN, Pace
from profiles.units import format_seconds

log = logging.getLogger(__name__)

FEWEST_STEPS = 3
# The step at which ranks first compare, and then at twice as many: a training that is saved by
# default has twenty steps after its warm-up.
FIRST_COMPARED = WARM_UP_STEPS + 20
# The share of a normal distribution that lies below one standard deviation above its middle.
_WITHIN = statistics.NormalDist().cdf(1.0)

_Mark = float | torch.cuda.Event


@dataclass(frozen=True, slots=True)
class RankTime:
    """Medians of one rank, seconds a step.

    Attributes:
        outside_s: between two steps: loading, the update, the user's loop.
        computing_s: forward and backward up to its last gradient; under FSDP2 forwards alone.
        waiting_s: before the forward and for the gradients of others, the transfer itself included;
            None under FSDP2, where it cannot be separated from computing.
        spread_s: variation of its own time from step to step: half the span of the middle 68 % of
            the steps, a standard deviation where they are normal.
    """

    outside_s: float
    computing_s: float
    waiting_s: float | None
    spread_s: float = 0.0

    @property
    def own_s(self) -> float:
        return self.outside_s + self.computing_s


@dataclass(frozen=True, slots=True)
class Imbalance:
    """All ranks' times, in rank order; the same on every rank.

    Attributes:
        ranks: their times.
        steps: noted by each rank, the fewest of all.
    """

    ranks: tuple[RankTime, ...]
    steps: int

    @property
    def slowest(self) -> int:
        """The rank with the most time of its own."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].own_s)

    @property
    def factor(self) -> float:
        """The slowest rank's time over the median of the others."""
        others = [t.own_s for rank, t in enumerate(self.ranks) if rank != self.slowest]
        return self.ranks[self.slowest].own_s / max(statistics.median(others), 1e-9)

    @property
    def pace(self) -> Pace:
        """The part that is saved of a run. Under FSDP2 forwards stand for computing, and time
        outside of them is left out: its share of a step is unknown."""
        slow, of = self.slowest, self.ranks
        has_whole = of[slow].waiting_s is not None
        own = [rank.own_s if has_whole else rank.computing_s for rank in of]
        others = [rank for rank in range(len(of)) if rank != slow]
        usual_s = max(statistics.median(of[rank].computing_s for rank in others), 1e-9)
        late_s = own[slow] - statistics.median(own[rank] for rank in others)
        return Pace(
            scatter=statistics.median(rank.spread_s for rank in of) / usual_s,
            straggling=max(0.0, late_s) / usual_s,
            slowest=slow,
        )

    def __str__(self) -> str:
        own = [rank.own_s for rank in self.ranks]
        if self.factor < 1 + EVEN:
            return (
                f"even: {len(own)} ranks take {format_seconds(min(own))} to"
                f" {format_seconds(max(own))} of their own a step"
            )
        slow = self.ranks[self.slowest]
        text = (
            f"rank {self.slowest} is the slowest: {format_seconds(slow.own_s)} of its own a step"
            f" ({format_seconds(slow.computing_s)} computing, {format_seconds(slow.outside_s)}"
            f" outside), {self.factor:.2f} times the median of the others"
        )
        waits = [
            rank.waiting_s
            for number, rank in enumerate(self.ranks)
            if number != self.slowest and rank.waiting_s is not None
        ]
        return text + (f", which wait {format_seconds(statistics.median(waits))}" if waits else "")


@dataclass(slots=True)
class _StepMarks:
    """One step's marks."""

    outside_s: float
    barrier_s: float
    waited_s: float = 0.0
    spans: list[tuple[_Mark, _Mark]] = field(default_factory=list)
    ending: tuple[_Mark, _Mark] | None = None


def why_not_measured(plan: Plan, world: World) -> str:
    """The reason why a rank's own time cannot be measured; empty where it can."""
    if world.size == 1:
        return "there is one rank"
    if world.is_fake:
        return "the other ranks do not exist"
    if plan.world_size > plan.data_degree:
        return "ranks of one replica wait for each other inside every forward"
    if plan.data_parallel.is_sharded and plan.compile:
        return "inside compiled units of FSDP2 the clock cannot be read"
    return ""


class RankTimer:
    """Marks of one rank's steps while it trains; none where `why_not_measured` has a reason."""

    def __init__(self, module: nn.Module, plan: Plan, profile: ModelProfile, world: World) -> None:
        self._plan, self._world = plan, world
        self._why_not = why_not_measured(plan, world)
        self._marked: deque[_StepMarks] = deque(maxlen=MOST_STEPS)
        self._current: _StepMarks | None = None
        self._left: float | None = None
        self._began: _Mark = 0.0
        self._last: _Mark | None = None
        self._hooks: dict[int, RemovableHandle] = {}
        self._latest = 0
        self._steps = 0
        self._compared_at = FIRST_COMPARED
        if self._why_not:
            return
        if plan.data_parallel.is_sharded:
            for unit in profile.shard_units():
                if unit.name:  # the model itself gathers its other units within
                    self._time_forwards(module.get_submodule(unit.name))
        else:
            self._watch_gradients(p for p in module.parameters() if p.requires_grad)

    @contextmanager
    def synchronised(self) -> Iterator[None]:
        """Around the synchronisation of all ranks before the forward."""
        if self._why_not:
            yield
            return
        arrived = time.perf_counter()
        yield
        met = time.perf_counter()
        outside = 0.0 if self._left is None else arrived - self._left
        self._current = _StepMarks(outside_s=outside, barrier_s=met - arrived)
        self._began, self._last = self._mark(), None

    def note_wait(self, seconds: float) -> None:
        """Note that the rank waited for others between the forward and the backward. A device
        computes meanwhile."""
        if self._current is not None and self._world.device.type != "cuda":
            self._current.waited_s = seconds

    def note_exchange(self) -> None:
        """Mark the end of the exchange: the gradients of all ranks are averaged."""
        step, self._current = self._current, None
        if step is None:
            return
        self._steps += 1
        if self._last is not None:
            step.spans.append((self._began, self._last))
            step.ending = self._last, self._mark()
        if self._left is not None:  # the first step has no step before it
            self._marked.append(step)
        self._left = time.perf_counter()
        self._keep_last_hook()

    def compare(self) -> Pace | None:
        """Compare the ranks, when it is time, and name one that the others wait for; all ranks call
        it after every exchange."""
        if self._steps < self._compared_at:
            return None
        self._compared_at *= 2
        times = self.gather()
        if self._world.rank == 0 and times.factor >= 1 + EVEN:
            log.warning("step %d: %s", self._steps, times)
        return times.pace

    def gather(self) -> Imbalance:
        """The times of all ranks; all of them call it.

        Raises:
            PlanError: a rank's own time cannot be measured under this plan.
            InputError: too few steps, on some rank.
        """
        if self._why_not:
            raise PlanError(f"imbalance is not measured: {self._why_not}", where=str(self._plan))
        marked = list(self._marked)[WARM_UP_STEPS - 1 :]
        size, rank = self._world.size, self._world.rank
        table = [0.0] * (5 * size)
        if marked:
            table[5 * rank : 5 * rank + 5] = [float(len(marked)), *self._medians(marked)]
        table = sum_over_ranks(table, self._world)
        fewest = int(min(table[::5]))
        if fewest < FEWEST_STEPS:
            raise InputError(
                f"{fewest} steps were timed, {FEWEST_STEPS} are wanted after"
                f" {WARM_UP_STEPS} of warm-up",
                hints=["call it after some more `train_step`"],
            )
        rows = [table[start + 1 : start + 5] for start in range(0, len(table), 5)]
        times = (RankTime(a, b, None if c < 0 else c, d) for a, b, c, d in rows)
        return Imbalance(ranks=tuple(times), steps=fewest)

    def _medians(self, marked: Sequence[_StepMarks]) -> tuple[float, float, float, float]:
        """Outside, computing, waiting (-1: not known), and the spread of a step, in seconds."""
        computing = [sum(_seconds(*span) for span in step.spans) - step.waited_s for step in marked]
        waiting = [
            step.barrier_s + step.waited_s + _seconds(*step.ending)
            if step.ending is not None
            else -1.0
            for step in marked
        ]
        outside = [step.outside_s if step.ending is not None else 0.0 for step in marked]
        own = [first + then for first, then in zip(outside, computing, strict=True)]
        return (
            statistics.median(step.outside_s for step in marked),
            statistics.median(computing),
            statistics.median(waiting),
            _spread(own),
        )

    def _mark(self) -> _Mark:
        if self._world.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _watch_gradients(self, parameters: Iterator[nn.Parameter]) -> None:
        """Hook every parameter in the first step, then only the one whose gradient comes last."""

        def watch(number: int, parameter: nn.Parameter) -> RemovableHandle:
            def came(_: Tensor) -> None:
                if self._current is not None:
                    self._last, self._latest = self._mark(), number

            hook: RemovableHandle = parameter.register_post_accumulate_grad_hook(came)
            return hook

        self._hooks = {number: watch(number, p) for number, p in enumerate(parameters)}

    def _keep_last_hook(self) -> None:
        for number in [number for number in self._hooks if number != self._latest]:
            self._hooks.pop(number).remove()

    def _time_forwards(self, unit: nn.Module) -> None:
        """Time forwards between FSDP2's own hooks: after its gather, before its release."""
        began: list[_Mark] = []

        def begin(*_: object) -> None:
            began[:] = [self._mark()]  # one whose forward broke off left its own

        def end(*_: object) -> None:
            start = began.pop() if began else None
            if self._current is not None and start is not None:
                self._current.spans.append((start, self._mark()))

        unit.register_forward_pre_hook(begin)
        unit.register_forward_hook(end, prepend=True)


def _spread(values: Sequence[float]) -> float:
    """Half the span of the middle values: rare pauses by other work do not count."""
    ordered = sorted(values)
    high = round(_WITHIN * (len(ordered) - 1))
    return (ordered[high] - ordered[len(ordered) - 1 - high]) / 2


def _seconds(first: _Mark, last: _Mark) -> float:
    if isinstance(first, float) or isinstance(last, float):
        assert isinstance(first, float)
        assert isinstance(last, float)
        return last - first
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e-3  # milliseconds
