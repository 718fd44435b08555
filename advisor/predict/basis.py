"""Basis: all of a step that does not depend on the fitted constants, so that a fit is quick."""

from __future__ import annotations

from dataclasses import dataclass

from advisor.cost.collective import collective_s
from advisor.cost.compute import HOST_BANDWIDTH_BYTES_PER_S
from advisor.predict.generations import generation_of, host_slowness, power_share
from advisor.predict.passes import Pass, again_of, backward_of, forward_of
from advisor.predict.setup import Setup
from advisor.predict.work import Work, work_of
from profiles.cluster import ClusterProfile, Collective

# Bytes an update moves per parameter it holds: Adam reads gradient, weight and two moments and
# writes three of them and the 16-bit weight (4 + 12 + 12 + 2), clipping and unscaling read and
# write gradients once more (8).
UPDATE_BYTES = 38
# DeepSpeed's pipeline waits for each tensor that it passes on, so that the host launches the first
# layer's kernels anew, forward and backward.
WAITS = 40
# Host time of plain modules over those of Transformer Engine, which Megatron builds its layers of
# since 2023: median of pairs of its own functional tests that run both (BERT and T5 in
# measured/megatron_ci_memory.csv, attention local or none against unfused; a test computes it).
PLAIN_MODULES, ENGINE = 0.8, 2023.0
# Launched once a step: norms, clipping and update over lists of tensors, loss and counters fetched.
# Calibrated: of 300, 400, 500 and 700 what small models on one and eight devices agree with best.
STEP_KERNELS = 400


@dataclass(frozen=True, slots=True)
class Basis:
    """A step before the fitted constants."""

    limited: bool
    host_slowness: float
    power: float
    forward: Pass
    backward: Pass
    again: Pass
    head: Pass
    slowest: float
    last: float
    stages: int
    virtual: int
    accumulation: int
    boundary_s: float
    tensor_rate: str
    data_rate: str
    boundary_rate: str
    reduce_s: float
    gather_s: float
    once_s: float
    zero: int
    update_s: float
    overlap_reduce: bool
    overlap_gather: bool
    buckets: bool
    overlap_tensor: bool
    overlap_boundary: bool
    waits: int
    blocking: bool
    fused_experts: bool
    once: int


def basis_of(setup: Setup) -> Basis:
    """All of a step that does not depend on fitted constants."""
    work, layout, software = work_of(setup), setup.layout, setup.software
    cluster = setup.cluster
    forward = backward = again = Pass()
    for layer, count in work.layers:
        one = forward_of(setup, layer)
        forward += one * count
        back = backward_of(setup, layer, one)
        backward += back * count
        again += again_of(setup, layer, one) * count
    head = forward_of(setup, work.head)
    head += backward_of(setup, work.head, head)
    ranks, apart = layout.dp * layout.cp, layout.world // layout.pp
    data = _data(setup, work)
    boundary = 0.0
    if layout.pp > 1:
        boundary = collective_s(
            cluster,
            Collective.SEND_RECV,
            work.boundary_bytes,
            group_size=2,
            stride=apart,
        )
    return Basis(
        limited=generation_of(cluster.device.name) in ("turing", "hopper", "blackwell"),
        host_slowness=host_slowness(cluster.device.name) * (1 if _engine(setup) else PLAIN_MODULES),
        power=power_share(cluster.device),
        forward=forward,
        backward=backward,
        again=again,
        head=head,
        slowest=work.slowest,
        last=work.last,
        stages=layout.pp,
        virtual=layout.virtual,
        accumulation=layout.accumulation,
        boundary_s=boundary,
        tensor_rate=_rate(cluster, layout.tp, 1),
        data_rate=_rate(cluster, ranks, layout.tp),
        boundary_rate=_rate(cluster, layout.pp, apart),
        reduce_s=data[0],
        gather_s=data[1],
        once_s=data[2],
        zero=layout.zero,
        update_s=_update_s(setup, work),
        overlap_reduce=software.overlap_reduce,
        overlap_gather=software.overlap_gather,
        buckets=software.family == "megatron",
        overlap_tensor=software.overlap_tensor,
        overlap_boundary=software.overlap_tensor,
        once=STEP_KERNELS if setup.shape is not None and setup.shape.vocab else 0,
        blocking=software.blocking,
        fused_experts=software.fused_experts,
        waits=WAITS if layout.pp > 1 and "deepspeed" in software.family else 0,
    )


def _data(setup: Setup, work: Work) -> tuple[float, float, float]:
    """Seconds of reducing gradients, of gathering weights, and of what comes once a step."""
    layout, software, cluster = setup.layout, setup.software, setup.cluster
    ranks = layout.dp * layout.cp
    stride = layout.tp
    shard = min(layout.shard, ranks)
    own = work.parameters
    expert_ranks = max(1, ranks * layout.tp // layout.ep)
    reduce = gather = once = 0.0
    zero = layout.zero
    kinds = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
    for parameters, size, step in (
        (own, ranks, stride),
        (work.expert_parameters, expert_ranks, layout.ep),
    ):
        if size < 2 or not parameters:
            continue
        whole = size
        size = min(size, shard) if zero == 3 else size
        sent = parameters * software.reduce_bytes
        pieces = _pieces(setup, parameters, size)
        at = {"group_size": size, "stride": step}
        if zero == 0 or (zero == 1 and software.family == "megatron-deepspeed"):
            # DeepSpeed's pipeline reduces whole gradients also where it splits optimizer states.
            reduce += collective_s(cluster, Collective.ALL_REDUCE, sent, **at)
        else:
            reduce += pieces * collective_s(cluster, kinds[0], sent / pieces, **at)
        if zero == 0:
            continue
        weights = parameters * min(software.weight_bytes, 2.0)
        if software.family == "internevo":
            # Each owner broadcasts its part to its shard group, along a chain of the nodes.
            at["group_size"] = owners = min(size, shard)
            chain = owners // cluster.ranks_per_node(owners, step)
            between = cluster.inter.latency_s.value if cluster.inter is not None else 0.0
            gather += owners * (chain - 1) * between
        gather += pieces * collective_s(cluster, kinds[1], weights / pieces, **at)
        if zero == 3 and size < whole:
            # What each shard group has reduced is reduced between the groups (HSDP).
            once += collective_s(
                cluster,
                Collective.ALL_REDUCE,
                sent / size,
                group_size=whole // size,
                stride=step * size,
            )
    if layout.pp > 1 and setup.shape is not None and setup.shape.tied:
        ends = setup.shape.vocab * setup.shape.hidden / layout.tp * software.reduce_bytes
        apart = layout.world // layout.pp
        once += collective_s(cluster, Collective.ALL_REDUCE, ends, group_size=2, stride=apart)
    return reduce, gather, once


def _pieces(setup: Setup, parameters: float, ranks: int) -> int:
    """Collectives in which gradients or weights travel.

    FSDP sends a block at a time; DeepSpeed's ZeRO-3 of 2021 each tensor by itself, about a dozen a
    layer; the others buckets so large that their latency does not count.
    """
    shape, software = setup.shape, setup.software
    if setup.layout.zero != 3 or shape is None:
        return 1
    single = software.family in ("megatron", "deepspeed", "megatron-deepspeed")
    return shape.layers * (12 if single and software.year < 2022 else 1)


def _update_s(setup: Setup, work: Work) -> float:
    layout = setup.layout
    parameters, expert_parameters = work.parameters, work.expert_parameters
    ranks = layout.dp * layout.cp
    expert_ranks = max(1, ranks * layout.tp // layout.ep)
    held = parameters + expert_parameters
    if setup.shape is not None and not setup.shape.vocab:
        return 0.0  # a layer by itself
    if layout.zero:
        shard = min(layout.shard, ranks) if layout.zero == 3 else ranks
        held = parameters / max(1, shard) + expert_parameters / expert_ranks
    if setup.software.offload.startswith("optimizer"):
        per_rank = HOST_BANDWIDTH_BYTES_PER_S / setup.cluster.devices_per_node
        return held * UPDATE_BYTES / per_rank
    return held * UPDATE_BYTES / setup.cluster.device.memory_bandwidth_bytes_per_s.value


def _rate(cluster: ClusterProfile, size: int, stride: int) -> str:
    """Which constant says what a group's collectives reach of their best."""
    if not cluster.crosses_nodes(size, stride):
        return "inside"
    cards = cluster.network_cards or cluster.devices_per_node
    return "shared" if cards < cluster.devices_per_node else "inside"


def _engine(setup: Setup) -> bool:
    return setup.software.family == "megatron" and setup.software.year >= ENGINE
