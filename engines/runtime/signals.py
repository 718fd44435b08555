"""Signals that tell a training to end, and one answer to them on all ranks.

Schedulers send SIGTERM, and SIGUSR1 where Slurm is told to (`--signal=USR1@120`), to one process or
to all. Ranks that left their loop after different steps would wait for each other until the time
limit.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from engines.runtime.world import World, largest_over_ranks, rank_error_context

ENDING = (signal.SIGTERM, signal.SIGUSR1)
ASKED_EVERY_S = 0.2
MOST_STEPS = 16
"""Between two questions to the other ranks, however short the steps are."""


class EndSignals:
    """Notes SIGTERM and SIGUSR1 while it is entered, and calls the handlers from before it too.

    In a thread that is not the main one it notes nothing: Python has no handlers there.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._received_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> EndSignals:
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, before in self._before.items():
            # None: a handler that is not Python's, which nobody can put back.
            signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before.clear()

    @property
    def age_s(self) -> float:
        """Seconds since the first signal; zero where none came."""
        return time.monotonic() - self._received_at if self.received is not None else 0.0

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._received_at = signal.Signals(number), time.monotonic()
        before = self._before.get(number)
        if callable(before):
            before(number, frame)


class AgreedSignal:
    """The signal that any rank received, asked between steps by all ranks alike.

    Short steps are not delayed by a question each: ranks count the steps to the next one from
    numbers that they exchanged, so that all ask after the same step.
    """

    def __init__(self, signals: EndSignals, world: World) -> None:
        self._signals, self._world = signals, world
        self._interval = self._left = 1
        self._asked_at = time.monotonic()

    def after_step(self) -> signal.Signals | None:
        """The signal of any rank, after a step; None also where this step is not asked after."""
        if self._world.size == 1 or self._world.is_fake:
            return self._signals.received
        self._left -= 1
        return None if self._left > 0 else self.ask()

    @rank_error_context("agreeing whether to end")
    def ask(self) -> signal.Signals | None:
        """The signal of any rank; all ranks call it."""
        if self._world.size == 1 or self._world.is_fake:
            return self._signals.received
        elapsed_s = time.monotonic() - self._asked_at
        own = float(self._signals.received or 0)
        number, slowest_s = largest_over_ranks([own, elapsed_s], self._world)
        steps = self._interval * ASKED_EVERY_S / max(slowest_s, 1e-6)
        self._interval = max(1, min(2 * self._interval, MOST_STEPS, int(steps)))
        self._left, self._asked_at = self._interval, time.monotonic()
        return signal.Signals(int(number)) if number else None
