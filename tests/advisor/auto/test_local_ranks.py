"""Errors of ranks at the end of the command that started them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from advisor.auto import local_ranks

RANK = """
import sys, threading
from pathlib import Path
from advisor.auto.local_ranks import ended_with
folder = Path(sys.argv[1])
with ended_with(folder):
    if sys.argv[2] == "over":
        threading.Timer(0.2, folder.rmdir).start()
    raise RuntimeError("connection reset by peer")
"""


@pytest.mark.parametrize(("command", "says"), [("over", False), ("running", True)])
def test_a_rank_tells_an_error_unless_the_command_is_over(
    tmp_path: Path, command: str, says: bool
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    rank = [sys.executable, "-c", RANK, str(folder), command]
    run = subprocess.run(rank, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1
    assert ("connection reset by peer" in run.stderr) is says
    assert bool(run.stderr) is says


@pytest.mark.parametrize(("gpus", "hidden"), [(0, False), (1, True), (2, False)])
def test_ranks_without_a_gpu_each_compute_on_the_cpu(
    gpus: int, hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, str] = {}

    def wait(command: list[str], environment: dict[str, str], **_: object) -> int:
        given.update(environment)
        return 0

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(local_ranks, "machine_cores", lambda: 12)
    monkeypatch.setattr("profiles.machine.gpus.gpu_count", lambda: gpus)
    monkeypatch.setattr(local_ranks, "_wait", wait)
    local_ranks.run_local_ranks(("advisor", "verify"), [], ranks=2, limit_s=1.0, name="it")
    assert (given.get("CUDA_VISIBLE_DEVICES") == "") is hidden
    assert given["OMP_NUM_THREADS"] == "6"
