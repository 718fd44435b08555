"""Ranks that a command starts on this machine, and waits for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from profiles.errors import RankError
from profiles.machine.host import machine_cores
from profiles.machine.launcher import LOOPBACK, loopback_environment

RANKS = 2
WATCH_EVERY_S = 0.5
# A rank hears that the store is gone before the folder is: from the kernel, at once.
_UNTIL_DELETED_S = 2.0


def usual_ranks() -> int:
    """Ranks to start where nobody says how many: `RANKS`, or as many as there are GPUs."""
    from profiles.machine.gpus import gpu_count  # torch counts them

    return min(RANKS, gpu_count() or RANKS)


def has_too_few_gpus(ranks: int) -> bool:
    """True where there are GPUs, but not one for each of `ranks`."""
    from profiles.machine.gpus import gpu_count

    return 0 < gpu_count() < ranks


def run_local_ranks(
    program: Sequence[str], words: Sequence[str], *, ranks: int, limit_s: float, name: str
) -> int:
    """Run `python -m PROGRAM --exit-code FILE WORDS` on `ranks` processes, under torchrun.

    A rank that writes a number into FILE says how the job ended. torchrun tells of failed ranks at
    length, so ranks end without failure where they know what to say themselves.

    Where there are GPUs, but not one for each rank, ranks compute on the CPU: NCCL takes no two
    ranks on one.

    Returns that number, else torchrun's exit code.

    Raises:
        RankError: the job, called `name`, did not end within `limit_s`.
    """
    with tempfile.TemporaryDirectory() as folder:
        exit_code = Path(folder) / "exit-code"
        command = [sys.executable, "-m", "torch.distributed.run", *LOOPBACK]
        command += ["--nproc-per-node", str(ranks), "-m", *program]
        command += ["--exit-code", str(exit_code), *words]
        # torchrun leaves files in TMPDIR; this folder is deleted at the end.
        threads = str(max(1, machine_cores() // ranks))
        given = {"OMP_NUM_THREADS": threads, **loopback_environment(), **os.environ}
        if has_too_few_gpus(ranks):
            given["CUDA_VISIBLE_DEVICES"] = ""
        failed = _wait(command, {**given, "TMPDIR": folder}, limit_s=limit_s, name=name)
        return int(exit_code.read_text()) if exit_code.exists() else failed


@contextmanager
def ended_with(folder: Path) -> Iterator[None]:
    """Exit when `folder` is deleted, as it is when the command ends. Ranks whose launcher was
    killed would otherwise wait for each other, or each print the loss of the others as an error."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(WATCH_EVERY_S):
            if not folder.is_dir():
                os._exit(1)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    except Exception:
        watcher.join(_UNTIL_DELETED_S)
        raise
    finally:
        is_over.set()
        watcher.join()


def _wait(command: list[str], environment: dict[str, str], *, limit_s: float, name: str) -> int:
    """Return the exit code of `command`; end it and its ranks if this process ends for any
    reason."""
    with _terminable():
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise RankError(f"{name} did not end within {limit_s:.0f} s") from None
        finally:
            # Nothing needs saving, so the launcher is killed at once. It has no time to kill its
            # ranks, which exit when the folder is deleted (see `ended_with`).
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def _terminable() -> Iterator[None]:
    """Make SIGTERM run `finally` clauses, as an interrupt does."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)  # shell convention

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
