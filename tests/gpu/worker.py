"""The process in which cases run: what hangs, dies or spoils the device ends with it, and the run
goes on in a new one."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

LINES = 12
"""Of a traceback that are kept: the last ones, the very last first."""


class WorkerError(Exception):
    """A task raised, died or took too long; the message says how."""


class Worker:
    """A process that calls functions, one after the other; started when it is needed.

    It may start processes of its own. A task that raises leaves it as it is: `close` ends it.
    """

    def __init__(self) -> None:
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float) -> Any:
        """`function(*args)` there; both importable and picklable.

        Raises:
            WorkerError: with the end of its traceback, or that it died or took too long; then the
                process is gone.
        """
        if self._process is None or not self._process.is_alive():
            self._start()
        assert self._pipe is not None
        assert self._process is not None
        began = time.monotonic()
        try:
            self._pipe.send((function, args))
            if not self._pipe.poll(timeout_s):
                self.close()
                raise WorkerError(f"did not end within {timeout_s:.0f} s")
            succeeded, value = self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join(timeout=10)
            code = self._process.exitcode
            self.close()
            took = time.monotonic() - began
            raise WorkerError(f"its process died after {took:.0f} s, exit code {code}") from None
        if not succeeded:
            raise WorkerError(value)
        return value

    def _start(self) -> None:
        self.close()
        context = multiprocessing.get_context("spawn")  # CUDA does not work after a fork
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,))
        process.start()
        theirs.close()
        self._process, self._pipe = process, ours

    def close(self) -> None:
        """Kill and reap the process."""
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.kill()
            self._process.join(timeout=10)
        self._process = self._pipe = None


def _serve(pipe: Connection) -> None:
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, function(*args))
        except Exception:
            lines = traceback.format_exc().strip().splitlines()
            answer = (False, "\n".join([lines[-1], *lines[-LINES:-1]]))
        pipe.send(answer)
