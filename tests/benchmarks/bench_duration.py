"""Duration of the bench: `python -m tests.benchmarks.bench_duration`, a table of 2 and 4 ranks.

Not a test: nothing here passes or fails. The times are of whole commands as a user types them,
interpreter and imports included.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from profiles.machine.clusters import load_cluster
from profiles.machine.host import machine_cores

ROOT = Path(__file__).resolve().parents[2]
RANKS = (2, 4)
TIME_LIMIT_S = 180.0


@dataclass(frozen=True, slots=True)
class Row:
    """One `advise` command under torchrun."""

    words: str
    seconds: float
    measured: str = ""


def run(ranks: int, words: list[str], folder: Path) -> float:
    """Seconds of `advise WORDS` on `ranks` ranks.

    Raises:
        subprocess.CalledProcessError, subprocess.TimeoutExpired: with what the ranks said.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "advisor", *words]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(max(1, machine_cores() // ranks)),
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    began = time.perf_counter()
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=TIME_LIMIT_S)
    return time.perf_counter() - began


def rows(ranks: int) -> Iterator[Row]:
    """A bench; a plan that benches first, the same plan with the bench kept, and without one."""
    plan = ["gpt-10m", "--cluster", "auto", "--global-batch", "16"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "cluster.toml"
        seconds = run(ranks, ["probe", "--bench", "-o", str(path)], folder)
        axes = load_cluster(path).axes
        fits = sum(len(axis.fits) for axis in axes)
        yield Row("probe --bench", seconds, f"{len(axes)} axes, {fits} fits")
        yield Row("gpt-10m --cluster auto, first", run(ranks, plan, folder))
        yield Row("gpt-10m --cluster auto, kept", run(ranks, plan, folder))
        yield Row("gpt-10m --no-bench", run(ranks, [*plan, "--no-bench"], folder))


def main() -> None:
    """Print the table."""
    say = sys.stdout.write
    say(f"{machine_cores()} cores, load {os.getloadavg()[0]:.1f} at the start\n")
    say(f"{'ranks':>5}  {'command':<32}{'whole':>8}  measured\n")
    for ranks in RANKS:
        for row in rows(ranks):
            line = f"{ranks:>5}  {row.words:<32}{row.seconds:>6.1f} s  {row.measured}"
            say(f"{line.rstrip()}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
