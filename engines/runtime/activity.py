"""Activity of this rank, as the ranks that wait for it see it: its step, and what it does there."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress

import torch.distributed as dist
from pydantic import Field

from engines.runtime.data_place import DataPlace, publish_end
from profiles.record import Record, json_object
from profiles.torch_compat import every_group, messages_of, recorded_messages

DEEPEST_FRAMES = 12
"""Of a stack that is shown: the user's call and what it led to."""
STACK_AFTER_S = 20.0
"""In one place: what ranks that go on are doing is of no use."""
LONGEST_LINE = 300


class Activity(Record):
    """A rank as its heartbeat publishes it.

    Attributes:
        step: number of the step that it is in; None between two steps.
        doing: what it exchanges there: "exchanging gradients".
        stood_s: seconds since it began the step, or the last message in it.
        bound_s: that other ranks are waited for in a step.
        messages: by group, those that it began: collectives, sends and receives.
        has_uneven_groups: there are groups besides, whose ranks rightly differ in their messages.
        collective: the last one, as torch names it; empty if torch does not say it.
        data: the batch that it took last; None after the end of a pass.
        stack: of the thread that trains, innermost frame last; empty outside of steps while it
            goes on.
    """

    step: int | None = None
    doing: str = ""
    stood_s: float = 0.0
    bound_s: float = 0.0
    messages: dict[str, int] = Field(default_factory=dict)
    has_uneven_groups: bool = False
    collective: str = ""
    data: DataPlace | None = None
    stack: tuple[str, ...] = ()

    @property
    def is_waiting(self) -> bool:
        """True if it stood still in a step for longer than others are waited for."""
        return self.step is not None and self.stood_s > self.bound_s

    def __str__(self) -> str:
        """Say where the rank is: "in step 5, exchanging gradients (gloo:all_reduce)"."""
        place = "between two steps" if self.step is None else f"in step {self.step}"
        what = f", {self.doing}" if self.doing else ""
        return f"{place}{what}" + (f" ({self.collective})" if self.collective else "")


class ActivityLog:
    """Notes of the thread that trains, read by that of the heartbeat."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._bound_s = 0.0
        self._doing = ""
        self._thread = threading.get_ident()
        self._uneven: Collection[dist.ProcessGroup] = ()
        self._seen: object = None
        self._last: int | None = None
        self.data: DataPlace | None = None
        self._since = time.monotonic()

    @contextmanager
    def in_step(
        self, number: int, *, bound_s: float, uneven: Collection[dist.ProcessGroup] = ()
    ) -> Iterator[None]:
        """Around a step.

        Args:
            bound_s: that other ranks are waited for in it.
            uneven: groups whose ranks rightly send different numbers of messages, as stages do.
        """
        self._thread, self._bound_s, self._uneven = threading.get_ident(), bound_s, uneven
        self._since = time.monotonic()
        self._step = self._last = number
        try:
            yield
        finally:
            self._step = None

    def doing(self, what: str) -> _Doing:
        """Around work that exchanges something."""
        return _Doing(self, what)

    def end_pass(self) -> None:
        """Note that the loader has no batch left, and tell it to the other ranks."""
        place, self.data = self.data, None
        if place is not None:
            publish_end(place, step=self._last)

    def wait_anew(self) -> None:
        """Count the time in one place from now on."""
        self._since = time.monotonic()

    def now(self) -> Activity:
        """The activity at this moment."""
        step, bound_s, uneven = self._step, self._bound_s, self._uneven
        counts = {}
        with suppress(RuntimeError, ValueError, KeyError):  # groups that are being destroyed
            counts = {_name(group): (group, messages_of(group)) for group in every_group()}
        seen = step, [count for _, count in counts.values()]
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        stood_s = time.monotonic() - self._since
        stands = stood_s >= min(STACK_AFTER_S, bound_s / 3)
        return Activity(
            step=step,
            doing=self._doing,
            stood_s=stood_s,
            bound_s=bound_s,
            messages={name: n for name, (group, n) in counts.items() if group not in uneven},
            has_uneven_groups=bool(uneven),
            collective=_last_collective() if stands and step is not None else "",
            data=self.data,
            stack=tuple(_stack_of(self._thread)) if step is not None or stands else (),
        )


class _Doing:
    """Work of a rank, noted until it is done. A class: steps enter several."""

    def __init__(self, log: ActivityLog, what: str) -> None:
        self._log, self._what = log, what

    def __enter__(self) -> None:
        self._log._doing, self._what = self._what, self._log._doing

    def __exit__(self, *_: object) -> None:
        self._log._doing = self._what


activity = ActivityLog()
"""Of this process."""


def late_ranks(ranks: Mapping[int, Activity]) -> list[int]:
    """The ranks that others wait for, in order; empty where that cannot be told.

    A rank that began fewer messages in a group than another one is waited for there; if it waits
    itself, in another group, it is not the cause. Where no count tells it and some are not
    compared, those are late whose thread is in no call that waits.
    """
    behind, ahead = set[int](), set[int]()
    for name in {name for each in ranks.values() for name in each.messages}:
        counts = {rank: a.messages[name] for rank, a in ranks.items() if name in a.messages}
        least = min(counts.values())
        if least < max(counts.values()):
            behind |= {rank for rank, count in counts.items() if count == least}
            ahead |= {rank for rank, count in counts.items() if count > least}
    late = behind - ahead
    if not late and any(each.has_uneven_groups for each in ranks.values()):
        late = {rank for rank, each in ranks.items() if not _is_in_a_wait(each)}
    return sorted(late) if len(late) < len(ranks) else []


def _is_in_a_wait(each: Activity) -> bool:
    innermost = each.stack[-1] if each.stack else ""
    return "torch/distributed/" in innermost or ".wait(" in innermost


def _last_collective() -> str:
    entries = json_object(recorded_messages(), where="flight recorder").get("entries")
    return str(entries[-1]["profiling_name"]) if entries else ""


def _name(group: dist.ProcessGroup) -> str:
    """Of a group in the whole job: those of one mesh axis may have one name."""
    return f"{group.group_name} of {dist.get_process_group_ranks(group)[0]}"


def _stack_of(thread: int) -> Iterator[str]:
    frame = sys._current_frames().get(thread)
    every = traceback.extract_stack(frame) if frame is not None else ()
    # Between two modules there are three frames of torch that say nothing.
    shown = [place for place in every if not place.filename.endswith("torch/nn/modules/module.py")]
    for place in shown[-DEEPEST_FRAMES:]:
        yield f"{place.filename}:{place.lineno} in {place.name}: {place.line or ''}"[-LONGEST_LINE:]
