"""Launch the demo's ranks on this machine with torchrun, and wait with a timeout."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from advisor.inputs.console import say
from engines.plan import AXES, PartialPlan, Plan
from profiles.errors import InputError, PlanError, RankError
from profiles.machine.host import machine_cores, machine_memory_bytes
from profiles.machine.launcher import LOOPBACK, loopback_environment
from profiles.units import GIB, format_gib

GLOBAL_BATCH = 16
TIME_LIMIT_S = 900.0  # longer means a hang
# The fullest rank of 1 to 4 peaks at 0.6 to 0.8 GiB; half of that is the interpreter and torch.
RANK_BYTES = 0.8 * GIB


def run(*, ranks: int, plan: str, steps: int | None) -> int:
    """Train on `ranks` local processes; return the job's exit code.

    Raises:
        InputError: this machine, or the batch, is too small for so many ranks.
        PlanError: the plan needs another number of ranks, or there is no prediction for it.
        RankError: the job did not end within `TIME_LIMIT_S`.
    """
    _require_room(ranks)
    needed = Plan.parse(plan).world_size
    if PartialPlan.parse(plan).fixes(*AXES) and needed != ranks:
        raise PlanError(
            f"plan `{plan}` needs {needed} ranks, the demo starts {ranks}",
            hints=[f"`advise demo --ranks {needed} --plan '{plan}'`"],
        )
    cores = machine_cores()
    if ranks > cores:
        say(f"note: {ranks} ranks on {cores} cores take turns: steps are slow, and vary")
    with tempfile.TemporaryDirectory() as folder:
        exit_code = Path(folder) / "exit-code"
        command = [sys.executable, "-m", "torch.distributed.run", *LOOPBACK]
        command += ["--nproc-per-node", str(ranks), "-m", "advisor.tutorial.demo.train"]
        command += ["--exit-code", str(exit_code)]
        command += ["--plan", plan] if plan else []
        command += ["--steps", str(steps)] if steps is not None else []
        # torchrun leaves files in TMPDIR; this folder is deleted at the end.
        threads = str(max(1, cores // ranks))
        given = {"OMP_NUM_THREADS": threads, **loopback_environment(), **os.environ}
        environment = {**given, "TMPDIR": folder}
        failed = _wait(command, environment)
        return int(exit_code.read_text()) if exit_code.exists() else failed


def _require_room(ranks: int) -> None:
    possible = [count for count in range(1, GLOBAL_BATCH + 1) if GLOBAL_BATCH % count == 0]
    memory = machine_memory_bytes()
    fitting = [count for count in possible if count * RANK_BYTES <= memory] or possible[:1]
    hint = f"take {', '.join(map(str, fitting))}"
    if ranks not in possible:
        raise InputError(
            f"the demo's batch of {GLOBAL_BATCH} samples does not divide over {ranks} ranks",
            where="--ranks",
            hints=[hint],
        )
    if ranks not in fitting:
        raise InputError(
            f"{ranks} ranks need {format_gib(ranks * RANK_BYTES)}, about"
            f" {format_gib(RANK_BYTES)} each; this machine has {format_gib(memory)}",
            where="--ranks",
            hints=[hint],
        )


def _wait(command: list[str], environment: dict[str, str]) -> int:
    """Return the exit code of `command`; end it and its ranks if this process ends for any
    reason."""
    with _terminable():
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            return process.wait(timeout=TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise RankError(f"the demo did not end within {TIME_LIMIT_S:.0f} s") from None
        finally:
            # Nothing needs saving, so the launcher is killed at once. It has no time to kill its
            # ranks, which exit when the folder is deleted (see `advisor.tutorial.demo.train`).
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
