"""The demo as users start it, short: decide, train, compare, save; and a plan that is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def demo(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-c", "from advisor.cli import main; main()", "demo", *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.dist
@pytest.mark.slow
def test_the_demo_decides_trains_compares_and_saves(tmp_path: Path) -> None:
    run = demo(tmp_path, "--steps", "8")
    assert run.returncode == 0, run.stderr
    for words in ("why", "it fits", "step time", "peak memory", "held out"):
        assert words in run.stdout
    first, last = (float(part.split()[0]) for part in _learnt(run.stdout))
    assert last < first - 1  # nats per byte of text it never saw
    assert (tmp_path / "runs" / "demo" / ".metadata").is_file()


@pytest.mark.dist
@pytest.mark.slow
def test_the_demo_refuses_a_plan_that_cannot_be_with_the_reason_and_no_traceback(
    tmp_path: Path,
) -> None:
    run = demo(tmp_path, "--plan", "tp=2")
    assert run.returncode == 2, run.stderr
    assert "tensor parallelism (tp=2) has no engine yet" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_plan_for_another_number_of_ranks_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    run = demo(tmp_path, "--plan", "dp_shard=4")
    assert run.returncode == 2
    assert "plan `dp_shard=4` needs 4 ranks, the demo starts 2" in run.stderr
    assert "advise demo --ranks 4 --plan 'dp_shard=4'" in run.stderr


def _learnt(text: str) -> tuple[str, str]:
    line = next(line for line in text.splitlines() if "held out" in line)
    before, after = line.split("held out")[1].split(" at first, ")
    return before.strip(), after.strip()
