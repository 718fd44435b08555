"""`python -m tests.benchmarks.heap [model ...]`: what glibc's heap holds beside a step's tensors.

Models of `tests.regret.models` at several batch sizes, each in a process of its own. After some
steps freed memory is given back, so that what is left lasts; the peak above it is what comes and
goes in a step. `advisor.cost.estimates.process_memory` has the holes, and
`advisor.auto.facts_from_module` what the first step brings.
"""

from __future__ import annotations

import subprocess
import sys
from statistics import median

import torch

from advisor.auto.facts_from_module import FIRST_USE_BYTES
from advisor.auto.parallelize import auto_parallelize
from advisor.cost import CostModel
from advisor.cost.estimates.process_memory import heap_bytes, process_memory
from advisor.decide.decision import Decision
from profiles.allocator.process_peak import (
    peak_memory_bytes,
    release_freed_memory,
    reset_peak_memory,
)
from profiles.machine.host import resident_bytes
from tests.regret.models import MODELS

MIB = 2**20
ROWS = (16, 64)
STEPS = 5
COLUMNS = f"{'':12} {'rows':>5} {'first use':>10} {'holes':>6} {'predicted':>10} {'measured':>9}"


def measured(name: str, rows: int) -> str:
    """Row of the table, of this process."""
    subject, cpu = MODELS[name], torch.device("cpu")
    batch = subject.batch(rows)
    parallel = auto_parallelize(
        subject.build(),
        sample=batch,
        loss_fn=subject.loss_fn,
        optimizer="adamw",
        plan=f"microbatch_size={rows}",
        global_batch_size=rows,
        learns=False,
    )
    decision = parallel.decision
    assert isinstance(decision, Decision)
    costs, plan, estimate = CostModel(decision.facts), decision.plan, decision.estimate
    predicted = process_memory(costs, plan, estimate).nbytes
    release_freed_memory()
    reset_peak_memory(cpu)
    for _ in range(STEPS):
        parallel.train_step(batch)
    peak = peak_memory_bytes(cpu)
    release_freed_memory()
    lasting, memory = resident_bytes(), estimate.memory
    known = memory.context - FIRST_USE_BYTES + memory.parameters + memory.optimizer
    first_use = lasting - known
    moving = memory.gradients + memory.activations + memory.gathered + memory.transient
    in_heap = heap_bytes(costs, plan, estimate)
    holes = (peak - lasting - (moving - in_heap)) / in_heap - 1
    return (
        f"{name:12} {rows:5} {first_use / MIB:6.0f} MiB {holes:6.2f}"
        f" {predicted / MIB:6.0f} MiB {peak / MIB:5.0f} MiB"
    )


def main(arguments: list[str]) -> int:
    if len(arguments) == 2 and arguments[1].isdecimal():
        print(measured(arguments[0], int(arguments[1])))
        return 0
    print(COLUMNS)
    lines = []
    for name in arguments or MODELS:
        for rows in ROWS:
            command = [sys.executable, "-W", "ignore", "-m", __spec__.name, name, str(rows)]
            run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
            lines.append(run.stdout.splitlines()[-1])
            print(lines[-1], flush=True)
    for column, what in ((2, "first use, MiB"), (4, "holes")):
        values = [float(line.split()[column]) for line in lines]
        print(f"{what}: {median(values)} ({min(values)} to {max(values)})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
