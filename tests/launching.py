"""torchrun started by a test, its ranks by their process ids, and an end of all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[1]


class Launched:
    """A launcher and the ranks that it started: as a context, none of them outlives it.

    Ranks are sessions of their own, and live on when their launcher is killed.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        module: str = "torch.distributed.run",
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start `python -m MODULE WORDS`; both streams go to `log`."""
        self.log = log
        own = {name: text for name, text in os.environ.items() if not name.startswith("TORCH_DIS")}
        own |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(environment or {})}
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *words],
                env=own,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        self._seen: set[int] = set()

    def __enter__(self) -> Launched:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def ranks(self) -> dict[int, int]:
        """Process ids of the ranks that live now, by rank."""
        living = {}
        for pid in _children(self.process.pid) | self._seen:
            rank = _rank(pid)
            if rank is not None:
                living[rank] = pid
        self._seen = set(living.values())
        return living

    def wait(self, timeout_s: float) -> int:
        """The launcher's exit code.

        Raises:
            TimeoutError: it did not end in time; with the end of its log.
        """
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"no end within {timeout_s:.0f} s:\n{self.tail()}") from None

    def tail(self, size: int = 4000) -> str:
        """The end of what launcher and ranks said."""
        return self.log.read_text(errors="replace")[-size:]

    def kill_launcher(self) -> None:
        """SIGKILL the launcher alone; `ranks` still names its ranks."""
        self.ranks()
        self.process.kill()
        self.process.wait()

    def kill(self) -> None:
        """SIGKILL launcher and ranks, and wait until they are gone."""
        pids = set(self.ranks().values())
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        pids |= set(self.ranks().values())
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while any(_rank(pid) is not None for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.01)


def _children(pid: int) -> set[int]:
    children: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children.update(map(int, task.read_text().split()))
    return children


def _rank(pid: int) -> int | None:
    """The rank of a process; None of one that is none, or is gone."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    ranks = [word for word in words if word.startswith(b"RANK=")]
    return int(ranks[0].removeprefix(b"RANK=")) if ranks else None
