"""Processes of their own: a script that just ends, as users' scripts do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import torch.distributed as dist
from tests.engines.updates.ranks import trained
from tests.engines.updates.test_servers import QUADRATIC, plain

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
options = {"case": QUADRATIC, "optimizer": plain}
_, parallel, losses, _ = trained("dp_replicate=1 servers=1", [4] * 3, **options)
print(losses[0] > losses[-1], parallel.update_report)
"""


@pytest.mark.dist
def test_a_server_s_process_ends_as_a_script_ends(tmp_path: Path) -> None:
    """Its threads still listen then, while the worker's connections close: nothing aborts."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "LOCAL_RANK": "0",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, (out, err) in zip(ranks, told, strict=True):
        assert rank.returncode == 0, err
        assert "terminate" not in err
        assert out.startswith("True 3 updates, 0 stale")
