"""A rank that is stopped ends the job by name, long before a collective's own timeout."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nightly import nightly

JOB = """
import os, signal, sys, time
import torch, torch.distributed as dist
from engines.runtime import heartbeat
from engines.runtime.world import join_world, leave_world, rank_error_context, require_same
from profiles.errors import RankError

heartbeat.EVERY_S, heartbeat.SILENT_S = 0.1, 1.5
world = join_world(timeout_s=500)
heartbeat.start_heartbeat()
dist.all_reduce(torch.ones(1))
mode = sys.argv[1]
if world.rank == 1 and mode != "late":
    os.kill(os.getpid(), signal.SIGSTOP)
if world.rank == 1:
    time.sleep(4)  # late, and alive
try:
    if mode == "store":
        require_same("thing", "one one", world)
    else:
        with rank_error_context("adding"):
            dist.all_reduce(torch.ones(1))
    print("done", flush=True)
except RankError as error:
    print(error.what, flush=True)
if world.rank == 0:
    time.sleep(2)  # it runs the store, which the others ask
leave_world()
"""


def answers(mode: str, ranks: int = 3) -> list[str]:
    """The first lines of all ranks but the stopped one, long before their groups' timeout."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    jobs = []
    for rank in range(ranks):
        names = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_PORT": port}
        environment = os.environ | {name: str(value) for name, value in names.items()}
        environment |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        jobs.append(
            subprocess.Popen(
                [sys.executable, "-c", JOB, mode],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path.cwd(),
            )
        )
    try:
        waited = [job for rank, job in enumerate(jobs) if rank != 1 or mode == "late"]
        return [job.communicate(timeout=150)[0].strip() for job in waited]
    finally:
        for job in jobs:
            job.send_signal(signal.SIGKILL)
            job.wait(timeout=10)
            assert job.stdout is not None
            job.stdout.close()


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["collective", *nightly("store")])
def test_a_stopped_rank_is_named_on_all_others(mode: str) -> None:
    texts = answers(mode)
    assert all("rank 1 shows no sign of life: it is stopped" in text for text in texts), texts


@pytest.mark.dist
def test_a_late_rank_is_waited_for() -> None:
    assert answers("late") == ["done"] * 3
