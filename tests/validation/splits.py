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

from advisor.inputs.facts import Facts
from advisor.whatif.sweep.points import Point, Sweep, Swept
from profiles.machine.cluster import ClusterProfile
from profiles.model.times import BlockTimes
from profiles.record import Document, Record
from tests.validation.command import NO_FACTS, command

REPORT = Path(__file__).with_name("splits.json")
MODEL, GLOBAL_BATCH, OPTIMIZER = "resnet50-64px", 24, "sgd"
CUT = "pp=2 schedule=gpipe stages=layer3.0"
PLANS = ("dp_replicate=1", "pp=2 schedule=naive stages=layer3.0", f"{CUT} microbatch_size=6")
SIZES = ("1", "2", "3", "4", "6", "8", "12", "24")
RANKS = 2
FEWEST_ROWS = 2  # batch norms want as many
STEPS = 7
BENCH_S = 15.0
RANK_LATE_S = 60.0
TIME_LIMIT_S = 400.0


class Ground(Record):
    """Bench and block times that a job measured before its sweep, to predict it.

    Attributes:
        cluster: its ranks, as benched.
        times: of the model's blocks, for each size of a microbatch.
    """

    cluster: ClusterProfile
    times: tuple[BlockTimes, ...]


class Part(Document):
    """One sweep, and the facts of its predictions."""

    sweep: Sweep
    ground: Ground


class Report(Document):
    """Both sweeps, and on what they were measured.

    Attributes:
        plans_ground, sizes_ground: None in reports of before they were stored.
    """

    measured_at: str
    machine: str
    torch: str
    plans: Sweep
    sizes: Sweep
    plans_ground: Ground | None = None
    sizes_ground: Ground | None = None

    @property
    def is_priced(self) -> bool:
        """True if both sweeps store what they are predicted from."""
        return self.plans_ground is not None and self.sizes_ground is not None


def measured(part: str) -> Part:
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
        return Part.load(path)


def _rank(path: str) -> None:
    """One rank of `measured`; the file's name says of which part."""
    from advisor.auto.measure import measured_sweep
    from engines.plan import PartialPlan
    from engines.runtime.world import join_world, leave_world
    from profiles.cache import every
    from profiles.machine.bench import bench
    from profiles.machine.probe import probe

    is_plans = Path(path).stem == "plans"
    world = join_world(timeout_s=RANK_LATE_S)
    # Both ranks time the blocks, rank 0 decides by its own: they must not meet in one cache.
    os.environ["XDG_CACHE_HOME"] = str(Path(path).with_name(f"cache{world.rank}"))
    cluster = bench(probe(), budget_s=BENCH_S)
    actual = measured_sweep(
        MODEL,
        Swept.PLAN if is_plans else Swept.SPLIT_SIZE,
        PLANS if is_plans else SIZES,
        settings=PartialPlan.parse("" if is_plans else CUT),
        global_batch_size=GLOBAL_BATCH,
        optimizer=OPTIMIZER,
        steps=STEPS,
        timeout_s=RANK_LATE_S,
        cluster=cluster,
    )
    if world.rank == 0:
        times = sorted(every("times", BlockTimes), key=lambda of: of.samples)
        Part(sweep=actual, ground=Ground(cluster=cluster, times=tuple(times))).save(path)
    leave_world()


def measure() -> Report:
    """Both parts, one after the other."""
    import torch

    plans, sizes = measured("plans"), measured("sizes")
    return Report(
        measured_at=datetime.now(UTC).strftime("%Y-%m-%d"),
        machine=f"{os.cpu_count()} cores {platform.machine()}",
        torch=torch.__version__,
        plans=plans.sweep,
        sizes=sizes.sweep,
        plans_ground=plans.ground,
        sizes_ground=sizes.ground,
    )


def repriced() -> Report:
    """Load the committed report, predicted by today's code if it stores the facts."""
    report = Report.load(REPORT)
    sweeps = {"plans": report.plans, "sizes": report.sizes}
    for part, ground in (("plans", report.plans_ground), ("sizes", report.sizes_ground)):
        if ground is not None:
            facts = captured(ground)
            points = tuple(priced(point, ground, facts) for point in sweeps[part].points)
            sweeps[part] = sweeps[part].model_copy(update={"points": points})
    return report.model_copy(update=sweeps)


def captured(ground: Ground) -> Facts:
    """The model on all devices; its amounts are those of any number of rows and devices."""
    from advisor.auto.facts_from_module import facts_from_module
    from advisor.auto.measure import OPTIMIZERS
    from advisor.inputs.models import load_model

    loaded = load_model(MODEL, samples=FEWEST_ROWS, sequence_length=None)
    return facts_from_module(
        loaded.module,
        loaded.sample,
        loss_fn=loaded.loss_fn,
        cluster=ground.cluster,
        global_batch_size=GLOBAL_BATCH,
        optimizer=OPTIMIZERS[OPTIMIZER],
    )


def priced(point: Point, ground: Ground, facts: Facts) -> Point:
    """With what is predicted for its plan today, from blocks timed at the rows of a microbatch."""
    from advisor.cost import estimate
    from advisor.inputs.resize import resized

    rows = max(FEWEST_ROWS, point.plan.microbatch_size or GLOBAL_BATCH)
    times = next(of for of in ground.times if of.samples == rows)
    model = facts.model.model_copy(update={"times": (times,)})
    cluster = resized(ground.cluster, point.devices)
    cost = estimate(point.plan, facts.model_copy(update={"model": model, "cluster": cluster}))
    return point.model_copy(
        update={"step_s": cost.step_s, "low_s": cost.step_low_s, "high_s": cost.step_high_s}
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
    note = "" if report.is_priced else f"\n\n{NO_FACTS}"
    return f"{report.machine}, torch {report.torch}\n\n{console.file.getvalue().rstrip()}{note}"


def main() -> int:
    """The command."""
    return command(
        REPORT,
        about=__doc__,
        rank=_rank,
        measure=measure,
        repriced=repriced,
        table=table,
        missing=lambda: None,
    )


if __name__ == "__main__":
    sys.exit(main())
