"""Start the demo's ranks on this machine, through torchrun, and wait for them with a bound."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from engines.plan import Plan, parse_settings
from profiles.errors import PlanError, RankError
from profiles.probe import machine_cores

TIME_LIMIT_S = 900.0  # a demo that is not done by then hangs
TERMINATE_S = 10.0


def run(*, ranks: int, plan: str, steps: int | None) -> int:
    """Train on `ranks` local processes; the exit code of the job.

    Raises:
        PlanError: the plan needs another number of ranks.
        RankError: the job did not end within `TIME_LIMIT_S`.
    """
    settings = parse_settings(plan)
    degrees = {"pp", "tp", "cp", "dp_replicate", "dp_shard"} & settings.keys()
    if degrees and Plan.build(settings, where="plan").world_size != ranks:
        needed = Plan.build(settings).world_size
        raise PlanError(
            f"plan `{plan}` needs {needed} ranks, the demo starts {ranks}",
            hints=[f"`advise demo --ranks {needed} --plan '{plan}'`"],
        )
    with tempfile.TemporaryDirectory() as folder:
        exit_code = Path(folder) / "exit-code"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "-m", "advisor.demo.train"]
        command += ["--exit-code", str(exit_code)]
        command += ["--plan", plan] if plan else []
        command += ["--steps", str(steps)] if steps is not None else []
        failed = _wait(command, threads=max(1, machine_cores() // ranks))
        return int(exit_code.read_text()) if exit_code.exists() else failed


def _wait(command: list[str], *, threads: int) -> int:
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return process.wait(timeout=TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise RankError(f"the demo did not end within {TIME_LIMIT_S:.0f} s") from None
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing behind: the launcher ends its ranks, then the whole group is ended."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=TERMINATE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
