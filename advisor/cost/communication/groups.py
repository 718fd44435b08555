"""Groups of communicating ranks: size and stride."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from advisor.cost.memory.buffers import shard_degree
from engines.plan import DataParallel, Plan
from profiles.workload.stack import TORCH, Stack


def shard_group(plan: Plan) -> tuple[int, int]:
    """Size and stride of the group that shards parameters or states, including cp."""
    return shard_degree(plan), plan.tp


def replica_group(plan: Plan) -> tuple[int, int]:
    """Size and stride of the group whose ranks hold the same shard, or full replica."""
    if plan.data_parallel is DataParallel.HYBRID_SHARD:
        return plan.dp_replicate, plan.dp_shard * plan.cp * plan.tp
    return plan.dp_replicate * plan.cp, plan.tp


def expert_copies(plan: Plan, stack: Stack = TORCH) -> tuple[int, int]:
    """Size and stride of the group whose ranks hold the same experts (`Mesh.expert_copies`).

    With cp the group consists of rows of cp neighbours with a stride of ep x cp; several rows are
    assumed to be evenly spread over the same ranks.
    """
    if stack.folds_experts:
        return max(1, plan.data_degree * plan.cp * plan.tp // plan.ep), plan.ep
    copies = plan.data_degree * plan.cp // plan.ep
    return copies, plan.tp if plan.ep == plan.data_degree else plan.ep * plan.tp


def tie_stride(stages: Sequence[int], plan: Plan) -> int:
    """Stride between the stages with copies of a tied weight; the mean for several.

    Three copies need not be equidistant (an encoder's embedding, a decoder's and the head). The
    mean is rounded up, up to the last rank.
    """
    ranks_per_stage, gaps = plan.world_size // plan.pp, len(stages) - 1
    mean = ceil((stages[-1] - stages[0]) * ranks_per_stage / gaps)
    return min(mean, (plan.world_size - 1) // gaps)
