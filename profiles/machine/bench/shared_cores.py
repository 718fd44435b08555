"""The speed of a rank while others wait: whether ranks take turns on their cores, and which do."""

from __future__ import annotations

import math
import statistics

import torch

from profiles.machine.bench.device import ROUNDS, large_edge, matmul_timing, measured
from profiles.machine.bench.job import Job
from profiles.machine.cluster import SharedCores

# Below it, a rank that computes alone has more of the caches and the memory, not another's core.
LEAST_SPEEDUP = 1.2


def shared_cores(job: Job, *, ranks_per_node: int, budget_s: float) -> SharedCores | None:
    """Time products on all ranks at once, on those of the first node, and on the first rank alone,
    in turns: what else the machine does then slows all of them.

    Ranks that wait block in a collective and leave their cores to others. None for one rank, for
    GPUs, and if a rank gains nothing from others' waiting.
    """
    if job.group is None or job.device.type == "cuda":
        return None
    computing = [job.ranks, ranks_per_node, 1]
    share_s = budget_s / len(computing) / ROUNDS
    rounds = [[_slowest_s(job, ranks, share_s) for ranks in computing] for _ in range(ROUNDS)]
    speedups = [together_s / alone_s for together_s, _, alone_s in rounds]
    speedup = statistics.median(speedups)
    if speedup < LEAST_SPEEDUP:
        return None
    # If only the ranks of a node share cores, they are as slow as all are.
    slowdown = statistics.median(node_s / alone_s for _, node_s, alone_s in rounds)
    return SharedCores(
        alone=measured(speedup, (max(speedups) - min(speedups)) / (2 * speedup)),
        across_nodes=ranks_per_node < job.ranks and slowdown < math.sqrt(speedup),
    )


def _slowest_s(job: Job, ranks: int, seconds: float) -> float:
    """Seconds of a product on the slowest of the first `ranks` ranks; the others wait."""
    median_s = 0.0
    job.barrier()
    if job.rank < ranks:
        edge = large_edge(job.device)
        median_s = matmul_timing(job.device, torch.float32, edge, seconds=seconds).median_s
    return job.slowest([median_s])[0]
