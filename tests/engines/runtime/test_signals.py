"""Handlers of a user's own, around a training that notes signals to end."""

from __future__ import annotations

import os
import signal

import pytest

from engines.runtime.signals import ENDING, EndSignals


@pytest.mark.parametrize("number", ENDING)
def test_a_handler_from_before_is_called_and_is_back_afterwards(number: signal.Signals) -> None:
    seen: list[int] = []

    def own(received: int, _: object) -> None:
        seen.append(received)

    before = signal.signal(number, own)
    try:
        with EndSignals() as signals:
            os.kill(os.getpid(), number)
            assert (signals.received, seen) == (number, [number])
        assert signal.getsignal(number) is own
    finally:
        signal.signal(number, before)
