"""Ranks that update apart from each other: step time with a straggler, bytes, and staleness.

    python -m tests.benchmarks.updates

Four gloo ranks train a small GPT; with a straggler the last one sleeps in every forward. Times are
means over steps, of the middle one of the workers that do not sleep; bytes are those that the
kernel sent in a step, of the rank that sent most.
"""

from __future__ import annotations

import statistics
import time

import torch.distributed as dist
from torch import nn

from tests.engines.parity import local_rows, spread
from tests.engines.updates.ranks import GPT
from tests.engines.updates.wire import counts, since
from tests.workers import Pool

RANKS, STEPS, WARM_UP = 4, 16, 2
SLEEP_S = 0.25
PLANS = (
    "dp_replicate=4",
    "dp_replicate=4 updates=local sync_every=4",
    "dp_replicate=4 updates=local sync_every=16",
    "dp_replicate=4 updates=diloco sync_every=16",
    "dp_replicate=3 servers=1",
    "dp_replicate=2 servers=1 backup_workers=1",
    "dp_replicate=2 servers=2",
    "dp_replicate=3 servers=1 updates=asynchronous",
    "dp_replicate=3 servers=1 updates=asynchronous max_staleness=1",
)
Told = tuple[float, float, str]


def measure(plan: str, sleep_s: float) -> Told:
    """Mean step, bytes sent in a step, and the report, on this rank."""
    _, parallel = spread(GPT, plan)
    rows = 4 * parallel.data_world_size
    batch = local_rows(parallel, GPT.batch(rows), rows)
    if dist.get_rank() == RANKS - 1:

        def sleep(module: nn.Module, args: object) -> None:
            time.sleep(sleep_s)

        parallel.module.register_forward_pre_hook(sleep)
    laps, before = [], counts()
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            before = counts()
        began = time.perf_counter()
        parallel.train_step(batch)
        laps.append(time.perf_counter() - began)
    sent = since(before)[0] / STEPS
    report = parallel.update_report
    parallel.synchronise()  # nobody leaves before all are done
    return statistics.fmean(laps[WARM_UP:]), sent, str(report) if report else ""


def main() -> None:
    pool = Pool(RANKS)
    print(f"{'plan':62} {'step':>8} {'straggler':>9} {'KB sent':>8}  first rank's report")
    try:
        for plan in PLANS:
            servers = int(plan.partition("servers=")[2][:1] or 0)
            even, uneven = (
                pool.run(measure, plan, sleep_s, world_size=RANKS, timeout_s=120)
                for sleep_s in (0.0, SLEEP_S)
            )
            steps = [
                1e3 * statistics.median(lap for lap, _, _ in found[servers : RANKS - 1])
                for found in (even, uneven)
            ]
            sent = max(sent for _, sent, _ in even) / 1e3
            print(f"{plan:62} {steps[0]:5.0f} ms {steps[1]:6.0f} ms {sent:8.0f}  {uneven[0][2]}")
    finally:
        pool.close()


if __name__ == "__main__":
    main()
