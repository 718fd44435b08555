"""Processes of their own: a script that just ends, as users' scripts do, or is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import torch.distributed as dist
from tests.engines.optional.async_updates.ranks import trained
from tests.engines.optional.async_updates.test_servers import QUADRATIC, plain

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
options = {"case": QUADRATIC, "optimizer": plain}
_, parallel, losses, batches = trained("dp_replicate=1 servers=1", [4] * 3, **options)
print(losses[0] > losses[-1], parallel.update_report)
"""
KILLED = """
import os, signal
if rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
parallel.train_step(batches[0])
"""


def run(program: str, store: Path) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of a server and its worker."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "LOCAL_RANK": "0",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(store)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, *each) for rank, each in zip(ranks, outputs, strict=True)]


@pytest.mark.dist
def test_a_server_process_ends_like_a_script(tmp_path: Path) -> None:
    """Its threads still listen then, while the worker's connections close: nothing aborts."""
    for code, out, err in run(PROGRAM, tmp_path / "store"):
        assert code == 0, err
        assert "terminate" not in err
        assert out.startswith("True 3 updates, 0 stale")


@pytest.mark.dist
def test_a_worker_exits_and_names_its_killed_server(tmp_path: Path) -> None:
    killed, (code, _, err) = run(PROGRAM + KILLED, tmp_path / "store")
    assert killed[0] == -signal.SIGKILL
    assert code == 1
    assert f"RankError: rank 0 (a server, on {socket.gethostname()}) is gone" in err
    assert "rank 1 of 2, exchanging parameters" in err
    assert "terminate" not in err
