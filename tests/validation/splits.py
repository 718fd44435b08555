"""ResNet-50 split over two ranks, measured here: in turn, as a pipeline, and by the size of splits.

`python -m tests.validation.splits` measures and writes `splits.json` beside this file; `--show`
prints its tables. Two gloo ranks of one core each, images of 64 x 64, cut where PyTorch's tutorial
on model parallelism cuts (before the third stage), its optimizer. What is predicted rests on a
bench of the same ranks in the same job and on blocks that were timed there, each part's by itself:
machines that do something else as well do not repeat themselves from one minute to the next.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from advisor.whatif.sweep.points import Sweep, Swept
from profiles.record import Document, read_text
from tests.validation.command import command

REPORT = Path(__file__).with_name("splits.json")
MODEL, GLOBAL_BATCH, OPTIMIZER = "resnet50-64px", 24, "sgd"
CUT = "pp=2 schedule=gpipe stages=layer3.0"
PLANS = ("dp_replicate=1", "pp=2 schedule=naive stages=layer3.0", f"{CUT} microbatch_size=6")
SIZES = ("1", "2", "3", "4", "6", "8", "12", "24")
RANKS = 2
STEPS = 7
BENCH_S = 15.0
RANK_LATE_S = 60.0
TIME_LIMIT_S = 400.0


class Report(Document):
    """Both sweeps, and on what they were measured."""

    measured_at: str
    machine: str
    torch: str
    plans: Sweep
    sizes: Sweep


def measured(part: str) -> Sweep:
    """`part` of the report, by a job of its own.

    Raises:
        RuntimeError: a rank failed, or the time was up; with its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{part}.json"
        words = ["--standalone", "--nproc-per-node", str(RANKS), "-m", "tests.validation.splits"]
        job = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words, "--rank", str(path)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": folder},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            said = job.communicate(timeout=TIME_LIMIT_S)[1]
        except subprocess.TimeoutExpired:
            job.terminate()  # torchrun ends its ranks
            said = job.communicate()[1]
        if job.returncode or not path.exists():
            raise RuntimeError(said)
        return Sweep.model_validate_json(read_text(path))


def _rank(path: str) -> None:
    """One rank of `measured`; the file's name says of which part."""
    from advisor.auto.measure import measured_sweep
    from engines.plan import PartialPlan
    from engines.runtime.world import join_world, leave_world
    from profiles.machine.bench import bench
    from profiles.machine.probe import probe

    is_plans = Path(path).stem == "plans"
    world = join_world(timeout_s=RANK_LATE_S)
    actual = measured_sweep(
        MODEL,
        Swept.PLAN if is_plans else Swept.SPLIT_SIZE,
        PLANS if is_plans else SIZES,
        settings=PartialPlan.parse("" if is_plans else CUT),
        global_batch_size=GLOBAL_BATCH,
        optimizer=OPTIMIZER,
        steps=STEPS,
        timeout_s=RANK_LATE_S,
        cluster=bench(probe(), budget_s=BENCH_S),
    )
    if world.rank == 0:
        Path(path).write_text(actual.model_dump_json())
    leave_world()


def measure() -> Report:
    """Both parts, one after the other."""
    import torch

    return Report(
        measured_at=datetime.now(UTC).strftime("%Y-%m-%d"),
        machine=f"{os.cpu_count()} cores {platform.machine()}",
        torch=torch.__version__,
        plans=measured("plans"),
        sizes=measured("sizes"),
    )


def table(report: Report) -> str:
    """The report for a person."""
    from io import StringIO

    from rich.console import Console

    from advisor.whatif.sweep.table import sweep_table

    console = Console(file=StringIO(), width=90)
    for sweep in (report.plans, report.sizes):
        console.print(sweep_table(sweep))
        console.print()
    assert isinstance(console.file, StringIO)
    return f"{report.machine}, torch {report.torch}\n\n{console.file.getvalue().rstrip()}"


def main() -> int:
    """The command."""
    return command(
        Report,
        REPORT,
        about=__doc__,
        rank=_rank,
        measure=measure,
        table=table,
        missing=lambda: None,
    )


if __name__ == "__main__":
    sys.exit(main())
