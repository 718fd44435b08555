"""The speed of a rank while others wait: whether ranks take turns on their cores, and which do."""

from __future__ import annotations

import math

import torch

from profiles.machine.bench.device import large_edge, matmul_timing, measured
from profiles.machine.bench.job import Job
from profiles.machine.cluster import SharedCores

# Below it, a rank that computes alone has more of the caches and the memory, not another's core.
LEAST_SPEEDUP = 1.2


def shared_cores(job: Job, *, ranks_per_node: int, budget_s: float) -> SharedCores | None:
    """Time products on all ranks at once, on those of the first node, and on the first rank alone.

    Ranks that wait block in a collective and leave their cores to others. None for one rank, for
    GPUs, and if a rank gains nothing from others' waiting.
    """
    if job.group is None or job.device.type == "cuda":
        return None
    together_s, error = _slowest(job, job.ranks, budget_s / 3)
    alone_s, alone_error = _slowest(job, 1, budget_s / 3)
    speedup = together_s / alone_s
    if speedup < LEAST_SPEEDUP:
        return None
    # With as many ranks as a node has. If only they share cores, they are as slow as all are.
    node_s = alone_s if ranks_per_node == 1 else _slowest(job, ranks_per_node, budget_s / 3)[0]
    return SharedCores(
        alone=measured(speedup, error + alone_error),
        across_nodes=ranks_per_node < job.ranks and node_s < math.sqrt(together_s * alone_s),
    )


def _slowest(job: Job, ranks: int, seconds: float) -> tuple[float, float]:
    """Seconds of a product on the slowest of the first `ranks` ranks, and the relative error; the
    others wait."""
    median_s = error = 0.0
    job.barrier()
    if job.rank < ranks:
        edge = large_edge(job.device)
        timing = matmul_timing(job.device, torch.float32, edge, seconds=seconds)
        median_s = timing.median_s
        error = (timing.high_s - timing.low_s) / (timing.high_s + timing.low_s)
    slowest_s, largest = job.slowest([median_s, error])
    return slowest_s, largest
