"""Small exposed collectives, and sums of gradients in flat messages."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from advisor.cost.communication.groups import expert_copies
from advisor.cost.ledger import Ledger
from advisor.cost.load.unit_load import UnitLoad
from advisor.cost.memory.buffers import BUCKET_BYTES
from engines.plan import Plan
from profiles.machine.cluster import Collective
from profiles.model.profile import ModelProfile
from profiles.workload.stack import TORCH, Stack

# The ranks count with four fp64 numbers (terms of the loss, rows, failed ranks, ranks that train),
# one more for each round of a pipeline, two more for every replica of several ranks, and two for
# the batch whose rows replicas take, all in one message (engines/data/microbatches.py); a loss is
# one fp32 number, and the common seed of the tp axis an int64.
COUNT_BYTES, ROUND_BYTES, PRINT_BYTES, SCALAR_BYTES, SEED_BYTES = 32, 8, 16, 4, 8


def small_collectives_s(
    plan: Plan,
    model: ModelProfile,
    ledger: Ledger,
    *,
    forward_s: float = 0.0,
    backward_s: float = 0.0,
) -> float:
    """Seconds per step of small exposed collectives: sample count and loss, the seed of split
    layers, checks for unused parameters, batch norms.

    Args:
        forward_s, backward_s: of a microbatch without stages. Replicas whose forwards exchange
            nothing count beside the first forward and sum their losses beside the last backward,
            as all replicas send their running statistics.
    """
    world = plan.world_size
    replicas, stride = plan.data_degree, plan.cp * plan.tp
    rounds = plan.forwards // plan.in_flight if plan.pp > 1 else 0
    prints = replicas * (world > replicas) + (replicas > 1)
    count = COUNT_BYTES + ROUND_BYTES * rounds + PRINT_BYTES * prints
    messages = (("sample count", count, forward_s), ("loss", SCALAR_BYTES, backward_s))
    seconds = 0.0
    for purpose, payload, beside_s in messages:
        one = ledger.charge(Collective.ALL_REDUCE, purpose, payload, group_size=world)
        seconds += max(0.0, one - beside_s * plan.is_ddp_alone)
    seconds += ledger.charge(
        Collective.SEND_RECV, "seed (broadcast)", SEED_BYTES, group_size=plan.tp
    )
    is_ddp = plan.is_replicated and plan.pp == plan.tp == 1
    if (model.may_skip_parameters and is_ddp) or (
        model.path_varies and plan.data_parallel.is_sharded
    ):
        # One number per parameter tensor; profiles do not count those, and latency dominates.
        seconds += ledger.charge(
            Collective.ALL_REDUCE, "unused parameters", SCALAR_BYTES, group_size=replicas * plan.cp
        )
    if not model.batch_norms or replicas < 2:
        return seconds
    if plan.sync_batch_norm:
        # Mean and variance with the forward, their gradients with the backward.
        count = 2 * len(model.batch_norms) * plan.forwards
        one = ledger.charge(
            Collective.ALL_REDUCE,
            "batch norm statistics",
            model.buffer_bytes / len(model.batch_norms),
            group_size=replicas,
            stride=stride,
            count=count,
        )
        return seconds + count * one
    one = ledger.charge(
        Collective.SEND_RECV,
        "buffers (broadcast)",
        model.buffer_bytes,
        group_size=replicas,
        stride=stride,
    )
    return seconds + max(0.0, one - backward_s)


def experts_s(
    plan: Plan,
    units: Iterable[UnitLoad],
    ledger: Ledger,
    *,
    reduced_share: float = 1.0,
    stack: Stack = TORCH,
) -> float:
    """Seconds to sum the gradients of experts that are not sharded, once a step.

    Args:
        units: on one rank.
        reduced_share: bytes sent per byte of gradient as built.
    """
    is_torch = stack.states is None  # others shard experts wherever they shard anything
    if plan.ep == 1 or plan.shards_experts or not (is_torch or plan.is_replicated):
        return 0.0
    copies, stride = expert_copies(plan, stack)
    nbytes, tensors = 0.0, 0
    for unit in units:
        nbytes += unit.count * (unit.expert_bytes + unit.unsharded_bytes)
        tensors += unit.count * unit.expert_tensors
    return summed_s(
        ledger,
        "gradients of experts",
        gradient_bytes=reduced_share * nbytes,
        tensors=tensors,
        group_size=copies,
        stride=stride,
    )


def summed_s(
    ledger: Ledger,
    purpose: str,
    *,
    gradient_bytes: float,
    tensors: int,
    group_size: int,
    stride: int,
) -> float:
    """Seconds of `engines.data.replicas.sum_gradients`: presence of gradients, then flat messages.

    A message is full when its last tensor exceeds 25 MiB: by half a tensor on average.
    """
    if group_size < 2 or not tensors or not gradient_bytes:
        return 0.0
    group = {"group_size": group_size, "stride": stride}
    seconds = ledger.charge(
        Collective.ALL_REDUCE, f"{purpose}: which there are", tensors * SCALAR_BYTES, **group
    )
    full = BUCKET_BYTES + gradient_bytes / tensors / 2
    count = 1 if gradient_bytes < BUCKET_BYTES else ceil(gradient_bytes / full)
    one = ledger.charge(
        Collective.ALL_REDUCE, purpose, gradient_bytes / count, **group, count=count
    )
    return seconds + count * one
