"""Stall of a training by saves in the background: phases with one save and without, by turns.

`python -m tests.benchmarks.async_save` measures and writes `tests/validation/async_save.json`;
`--show` prints its table. A GPT of 10 M parameters trains with AdamW on one rank and on two that
share the machine's cores. A phase is `INTERVAL` steps; every other one begins with a save.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from advisor.auto.parallelize import auto_parallelize
from advisor.inputs.bundled.gpt import GPT, GPTConfig, loss
from profiles.record import Document, Record
from tests.engines.cases import cpu_ranks
from tests.workers import Pool

REPORT = Path(__file__).parents[1] / "validation" / "async_save.json"
INTERVAL = 30
PHASES = 6
"""Of each kind."""
ROWS, LENGTH = 4, 128
PLANS = ("dp_replicate=1", "dp_shard=2")


class Row(Record):
    """One plan.

    Attributes:
        saved_mib: one save, over all ranks.
        step_s: median over the phases without a save.
        waiting_s: median of saves that the training waits for.
        copying_s: median time until `async_save` returns.
        stall: median of each phase with a save over the next one without it, less one.
        stalls: of every pair of phases.
    """

    plan: str
    saved_mib: float
    step_s: float
    waiting_s: float
    copying_s: float
    stall: float
    stalls: tuple[float, ...]


class Report(Document):
    """The rows, and the machine."""

    measured_at: str
    machine: str
    torch: str
    rows: tuple[Row, ...]


def measured(plan: str, folder: str) -> Row:
    """Train on every rank of `plan`."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ranks = 1 if plan.endswith("=1") else 2
    ids = torch.randint(256, (ROWS, LENGTH + 1))
    batch = (ids[:, :-1], ids[:, 1:])
    model = GPT(GPTConfig(vocab_size=256, context=LENGTH, num_layers=6, num_heads=6, width=384))
    parallel = auto_parallelize(
        model, sample=batch, loss_fn=loss, plan=plan, cluster=cpu_ranks(ranks), learns=False
    )

    def phase(*, saves: bool) -> tuple[float, float]:
        began = time.perf_counter()
        if saves:
            parallel.async_save(folder, keep_last=1)
        copied = time.perf_counter()
        for _ in range(INTERVAL):
            parallel.train_step(batch)
        return time.perf_counter() - began, copied - began

    phase(saves=False)
    waiting = []
    for _ in range(3):
        began = time.perf_counter()
        path = parallel.save(folder, keep_last=1)
        waiting.append(time.perf_counter() - began)
    size = sum(file.stat().st_size for file in path.iterdir())
    pairs = [(phase(saves=True), phase(saves=False)) for _ in range(PHASES)]
    stalls = [with_save / without - 1 for (with_save, _), (without, _) in pairs]
    return Row(
        plan=plan,
        saved_mib=round(size / 2**20, 1),
        step_s=statistics.median(without for _, (without, _) in pairs) / INTERVAL,
        waiting_s=statistics.median(waiting),
        copying_s=statistics.median(copied for (_, copied), _ in pairs),
        stall=statistics.median(stalls),
        stalls=tuple(round(each, 4) for each in stalls),
    )


def measure() -> Report:
    rows = []
    for plan in PLANS:
        folder = tempfile.mkdtemp(prefix="async-save-")
        pool = Pool(1 if plan.endswith("=1") else 2)
        try:
            rows.append(pool.run(measured, plan, folder, world_size=pool.size, timeout_s=1200)[0])
        finally:
            pool.close()
            shutil.rmtree(folder)
    return Report(
        measured_at=datetime.now(UTC).isoformat(timespec="minutes"),
        machine=f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        torch=torch.__version__,
        rows=tuple(rows),
    )


def table(report: Report) -> str:
    lines = [f"{report.machine}, torch {report.torch}, {report.measured_at}"]
    lines += [
        f"{row.plan:16} {row.saved_mib:6.0f} MiB every {INTERVAL} steps of {row.step_s * 1e3:.0f}"
        f" ms: stall {row.stall:+.1%} ({min(row.stalls):+.1%} to {max(row.stalls):+.1%}),"
        f" {row.copying_s * 1e3:.0f} ms to copy; a save in the foreground takes"
        f" {row.waiting_s * 1e3:.0f} ms"
        for row in report.rows
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", action="store_true", help="print the table of the report")
    if not parser.parse_args().show:
        measure().save(REPORT)
    sys.stdout.write(f"{table(Report.load(REPORT))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
