"""Planning times: `python -m tests.benchmarks.planning_time`, two tables.

Not a test: nothing here passes or fails. The first table is of whole processes of `advise`, from
start to end, for a bundled model on 1,024 devices and the twenty models of `known_configs`: CPU
seconds, seconds until the first line is on the screen (a terminal), and memory.
The second is of decisions alone, on one core, with the comparison of every kind of plan: models are
counted from their config.json in closed form, which is not part of these times.
"""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from advisor.decide.choose import choose
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Objective, Policy
from profiles.closed_forms.families import profile_from_config
from profiles.machine.clusters import resolve_cluster
from profiles.model.profile import ModelProfile, Numerics
from profiles.workload.workload import Workload
from tests.benchmarks.known_configs import KNOWN, LLAMA_70B, LLAMA_405B, Config

LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Process:
    """A command line of `advise`, about the content of a config.json if there is one."""

    name: str
    options: str
    config: Config | None = None


HELP = "--help"
NAMED = "gpt-7b --cluster 128x8xH100-SXM-80GB --global-batch 1024 --precision bf16"
PROCESSES = (
    Process(HELP, HELP),
    Process("gpt-7b", NAMED),
    *(Process(known.name, known.options, known.config) for known in KNOWN),
)


@dataclass(frozen=True, slots=True)
class Used:
    """By one process, from its start to its end.

    Attributes:
        first_line_s: until it said something on its terminal.
        peak_mib: the most main memory that it had.
    """

    cpu_s: float
    seconds: float
    first_line_s: float
    peak_mib: float


@dataclass(frozen=True, slots=True)
class Case:
    """A model on so many nodes of eight H100, and samples of 8,192 tokens a step."""

    name: str
    config: Config
    nodes: int
    batch: int


CASES = (
    Case("70B", LLAMA_70B, 8, 512),
    Case("405B", LLAMA_405B, 128, 2048),
    Case("405B", LLAMA_405B, 2048, 2048),
    Case("405B", LLAMA_405B, 2048, 16384),
)


def profile(case: Case) -> ModelProfile:
    kinds = (Numerics.AS_BUILT, Numerics.BF16, Numerics.BF16_AUTOCAST)
    return profile_from_config(
        case.config, samples=1, sequence_length=8192, name=case.name, numerics=kinds
    )


def used_by(process: Process, *, limit_s: float = LIMIT_S) -> Used:
    """Run it with a terminal for stderr, or for stdout where nothing is said on stderr.

    Raises:
        RuntimeError: it did not end within `limit_s`, or not with exit code 0.
    """
    words = process.options.split()
    with tempfile.TemporaryDirectory() as folder:
        if process.config is not None:
            path = Path(folder, "model.json")
            path.write_text(json.dumps(process.config))
            words = [str(path), *words]
        return _used_by([sys.executable, "-m", "advisor", *words], limit_s)


def _used_by(command: list[str], limit_s: float) -> Used:
    screen, end = pty.openpty()
    start = time.perf_counter()
    streams = {"stdout": end if command[-1] == HELP else subprocess.DEVNULL, "stderr": end}
    run = subprocess.Popen(command, **streams)  # type: ignore[call-overload]
    os.close(end)
    killer = threading.Timer(limit_s, run.kill)
    killer.start()
    first, said = 0.0, b""
    try:
        while part := _read(screen):
            first = first or time.perf_counter() - start
            said += part
        _, status, used = os.wait4(run.pid, 0)
    finally:
        killer.cancel()
        os.close(screen)
    seconds = time.perf_counter() - start
    run.returncode = os.waitstatus_to_exitcode(status)
    if run.returncode:
        lines = said.decode(errors="replace").strip().splitlines() or ["nothing"]
        raise RuntimeError(f"exit code {run.returncode} after {seconds:.0f} s: {lines[-1]}")
    return Used(used.ru_utime + used.ru_stime, seconds, first, used.ru_maxrss / 1024)


def _read(screen: int) -> bytes:
    try:
        return os.read(screen, 4096)
    except OSError:  # the other end is closed
        return b""


def processes() -> None:
    print(f"{'process':18} {'CPU s':>6} {'wall s':>6} {'first line s':>12} {'MiB':>6}")
    for process in PROCESSES:
        used = used_by(process)
        print(
            f"{process.name:18} {used.cpu_s:6.2f} {used.seconds:6.2f} {used.first_line_s:12.2f}"
            f" {used.peak_mib:6.0f}",
            flush=True,
        )


def main() -> None:
    processes()
    print()
    print(f"{'model':6} {'GPUs':>6} {'batch':>6} {'objective':9} {'plans':>9} {'exact':>6} seconds")
    for case in CASES:
        facts = Facts(
            model=profile(case),
            cluster=resolve_cluster(f"{case.nodes}x8xH100-SXM-80GB"),
            workload=Workload(global_batch_size=case.batch, precision="bf16"),
        )
        for objective in (Objective.TREE, Objective.TIME):
            wall, cpu = time.perf_counter(), time.process_time()
            decision = choose(facts, policy=Policy(objective=objective))
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            print(
                f"{case.name:6} {facts.cluster.world_size:6} {case.batch:6} {objective:9}"
                f" {decision.weighed:9,} {decision.estimated:6} {cpu:.2f} (wall {wall:.2f})"
                f"  {decision.estimate.mfu:.0%} MFU: {_degrees(decision.plan)}"
            )


def _degrees(plan: object) -> str:
    words = str(plan).split()
    return " ".join(w for w in words if not w.startswith(("tensor_styles", "stages")))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
