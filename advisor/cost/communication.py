"""Communication: what a plan sends in a step, unit by unit, and the seconds of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, hypot

from advisor.cost.aggregation import buffer_share, slowest, steps
from advisor.cost.compression import Sent
from advisor.cost.groups import expert_copies, replica_group, shard_group
from advisor.cost.ledger import Ledger
from advisor.cost.loads import Loads, UnitLoad
from advisor.cost.memory import BUCKET_BYTES
from engines.plan import Aggregation, DataParallel, Plan, Recompute, Schedule
from profiles.cluster import ClusterProfile, Collective
from profiles.stack import TORCH, Stack

# DDP's first bucket is small, so that something is sent early (dist._DEFAULT_FIRST_BUCKET_BYTES).
FIRST_BUCKET_BYTES = 2**20
# How far latency + bytes/bandwidth is from a real collective, beside the errors of its inputs.
# Published busbw of one link differs by this much between ring and tree (8 H200: 367 and 480 GB/s
# of all-reduce; ml-engineering network).
COMMUNICATION_ERROR = 0.25


@dataclass(frozen=True, slots=True)
class Exchange:
    """Seconds of a plan's collectives for each entry of the loads, of one unit and microbatch.

    Attributes:
        gather_s: of each unit's parameters before its forward or backward.
        reduce_s: of each unit's gradients inside the shard group.
        replicate_s: of each unit's gradients (or shards) between replicas.
        tensor_forward_s, tensor_backward_s, tensor_again_s: among the ranks of the tp axis, in a
            forward, a backward, and a forward that is run again.
        root_gather_s, root_reduce_s, root_replicate_s: the same for the root group.
    """

    gather_s: tuple[float, ...]
    reduce_s: tuple[float, ...]
    replicate_s: tuple[float, ...]
    tensor_forward_s: tuple[float, ...]
    tensor_backward_s: tuple[float, ...]
    tensor_again_s: tuple[float, ...]
    root_gather_s: float = 0.0
    root_reduce_s: float = 0.0
    root_replicate_s: float = 0.0


def waiting_bytes(plan: Plan, cluster: ClusterProfile, replicas: Sent) -> float:
    """What arrives of a bucket of gradients beside it, where messages are added up."""
    group, stride = replica_group(plan)
    per_node = cluster.ranks_per_node(group, stride)
    share = buffer_share(plan.aggregation, group, per_node=per_node)
    return share * min(replicas.total_bytes, BUCKET_BYTES)


def exchange(
    plan: Plan,
    loads: Loads,
    ledger: Ledger,
    *,
    has_host: bool,
    sent: Sent,
    reduced_share: float = 1.0,
    stack: Stack = TORCH,
) -> Exchange:
    """What `plan` sends of the parameters, gradients and activations of `loads` in one step.

    Without stages; see `stage_exchange`. `sent` is what replicas exchange of gradients, of which
    `reduced_share` goes over the links. `stack` says how tokens go to experts.
    """
    units, kind = loads.entries, plan.data_parallel
    found = _tensor(plan, units, ledger, stack=stack)
    if plan.is_replicated:
        return replace(
            found, replicate_s=_replicas(plan, loads, ledger, sent, reduced_share=reduced_share)
        )
    if kind.is_sharded:
        return _shards(
            found,
            plan,
            loads,
            ledger,
            has_host=has_host,
            root_gathers=plan.forwards,
            reductions=plan.forwards,
            reduced_share=reduced_share,
            stack=stack,
        )
    return found


def stage_exchange(
    plan: Plan,
    loads: Loads,
    ledger: Ledger,
    *,
    has_host: bool,
    root_gathers: int,
    reduced_share: float = 1.0,
    stack: Stack = TORCH,
) -> Exchange:
    """The same of one stage of a pipeline.

    FSDP2 gathers as without stages, and reduces when a round is over, ZeRO-1 after the last one.

    Args:
        root_gathers: how often the root group is gathered where it is not kept for the step.
    """
    found = _tensor(plan, loads.entries, ledger, stack=stack)
    if not plan.data_parallel.is_sharded:
        return found
    return _shards(
        found,
        plan,
        loads,
        ledger,
        has_host=has_host,
        root_gathers=root_gathers,
        reductions=rounds_of(plan),
        reduced_share=reduced_share,
        stack=stack,
    )


def rounds_of(plan: Plan) -> int:
    """How often the pipeline fills and drains in a step; the naive one does for each microbatch."""
    return plan.forwards if plan.schedule is Schedule.NAIVE else plan.accumulation


def _distinct(ledger: Ledger, group: int, stride: int, copies: float) -> float:
    """Share of a token's copies that leave for different nodes, experts being drawn evenly."""
    nodes = ceil(group / ledger.ranks_per_node(group, stride))
    if nodes < 2:
        return 1.0
    return float(nodes * (1 - (1 - 1 / nodes) ** copies) / copies)


def _tensor(plan: Plan, units: Sequence[UnitLoad], ledger: Ledger, *, stack: Stack) -> Exchange:
    """Collectives inside units; each is waited for. Recompute repeats those of forwards."""
    groups = {
        "tp": (plan.tp, 1),
        "cp": (plan.cp, plan.tp),
        "ep": (plan.ep, 1 if stack.folds_experts else plan.cp * plan.tp),
    }
    forward, backward, again = [], [], []
    for unit in units:
        sums = [0.0, 0.0, 0.0]
        runs_again = unit.is_block and plan.recompute is not Recompute.NONE
        for each in unit.exchanges:
            repeats = runs_again and each.is_repeated
            group, stride = groups[each.axis]
            payload = each.payload_bytes
            if stack.sends_tokens_once and each.copies > 1:
                payload *= _distinct(ledger, group, stride, each.copies)
            seconds = ledger.charge(
                each.kind,
                each.purpose,
                payload,
                group_size=group,
                stride=stride,
                count=plan.forwards * unit.count * (2 if repeats else 1),
            )
            if each.axis == "tp":
                seconds *= 1 - stack.overlap_tensor
            sums[0 if each.in_forward else 1] += seconds
            sums[2] += seconds * repeats
        forward.append(sums[0])
        backward.append(sums[1])
        again.append(sums[2])
    zeros = (0.0,) * len(units)
    return Exchange(zeros, zeros, zeros, tuple(forward), tuple(backward), tuple(again))


def _replicas(
    plan: Plan, loads: Loads, ledger: Ledger, sent: Sent, *, reduced_share: float
) -> tuple[float, ...]:
    """DDP: all gradients once per step, in buckets that fill as the backward goes.

    A bucket's latency is shared by the units in it; so is what is done to make it smaller.
    """
    total = loads.gradient_bytes
    first = min(total, FIRST_BUCKET_BYTES)
    buckets = ceil((total - first) / BUCKET_BYTES)
    sizes = [(first, 1), ((total - first) / buckets, buckets)] if buckets else [(first, 1)]
    whole = sent.work_s
    for bucket, count in sizes:
        for sum_bytes in sent.sums_bytes:
            payload = reduced_share * bucket * sum_bytes / total
            whole += count * _summed(plan, payload, ledger, count=count)
    return tuple(whole * unit.gradient_bytes / total for unit in loads.entries)


def _summed(plan: Plan, payload: float, ledger: Ledger, *, count: int) -> float:
    """Seconds of a sum over the replicas: a collective, or the messages that it is made of."""
    group, stride = replica_group(plan)
    if plan.aggregation is Aggregation.BACKEND:
        return ledger.charge(
            Collective.ALL_REDUCE,
            "gradients",
            payload,
            group_size=group,
            stride=stride,
            count=count,
        )
    seconds = 0.0
    per_node = ledger.ranks_per_node(group, stride)
    for step in steps(plan.aggregation, group, per_node=per_node):
        _, load = slowest(step, payload, ledger, stride=stride)
        seconds += step.rounds * ledger.charge(
            Collective.SEND_RECV,
            f"gradients ({plan.aggregation})",
            load.share * payload,
            group_size=load.size,
            stride=load.apart * stride,
            count=count * step.rounds,
        )
    return seconds


def _shards(
    found: Exchange,
    plan: Plan,
    loads: Loads,
    ledger: Ledger,
    *,
    has_host: bool,
    root_gathers: int,
    reductions: int,
    reduced_share: float,
    stack: Stack,
) -> Exchange:
    """FSDP2: gathers in the dtype of computing, reductions in the dtype of the masters.

    ZeRO-1 and ZeRO-2 gather once a step; ZeRO-3 before each forward and backward. ZeRO-1 reduces
    once a step. HSDP adds one all-reduce of gradient shards a step.

    Args:
        root_gathers, reductions: in a step, of plans that gather and reduce more than once.
    """
    kind = plan.data_parallel
    gathers = 2 * plan.forwards
    if kind in (DataParallel.ZERO1, DataParallel.ZERO2):
        gathers = root_gathers = 1
    if kind is DataParallel.ZERO1:
        reductions = 1
    group, stride = shard_group(plan)
    offloads = plan.offload.states and has_host

    copies = dict(zip(("group_size", "stride"), expert_copies(plan, stack), strict=True))

    def gather(payload: float, times: int, experts: float = 0.0) -> float:
        sent = (payload - experts) * loads.compute_share
        seconds = ledger.charge(
            Collective.ALL_GATHER,
            "parameters",
            sent,
            group_size=group,
            stride=stride,
            count=times,
        )
        if experts:
            sent = experts * loads.compute_share
            seconds += ledger.charge(
                Collective.ALL_GATHER, "parameters of experts", sent, **copies, count=times
            )
        return seconds + to_host(payload, times)

    def reduce(payload: float, times: int, experts: float = 0.0) -> float:
        payload, experts = reduced_share * payload, reduced_share * experts
        seconds = ledger.charge(
            Collective.REDUCE_SCATTER,
            "gradients",
            payload - experts,
            group_size=group,
            stride=stride,
            count=times,
        )
        if experts:
            seconds += ledger.charge(
                Collective.REDUCE_SCATTER, "gradients of experts", experts, **copies, count=times
            )
        return seconds + to_host(payload, times)

    def to_host(payload: float, times: int) -> float:
        if not offloads:
            return 0.0
        return ledger.to_host(payload / group, count=times)

    def replicate(payload: float, count: int) -> float:
        if plan.data_parallel is not DataParallel.HYBRID_SHARD:
            return 0.0
        size, apart = replica_group(plan)
        payload *= reduced_share
        return ledger.charge(
            Collective.ALL_REDUCE,
            "gradient shards",
            payload / group,
            group_size=size,
            stride=apart,
            count=count,
        )

    separate = [u if u.is_separate else None for u in loads.entries]
    return replace(
        found,
        gather_s=tuple(
            gather(u.parameter_bytes, gathers * u.count, u.expert_bytes) if u else 0.0
            for u in separate
        ),
        reduce_s=tuple(
            reduce(u.gradient_bytes, reductions * u.count, u.expert_bytes) if u else 0.0
            for u in separate
        ),
        replicate_s=tuple(replicate(u.gradient_bytes, u.count) if u else 0.0 for u in separate),
        # The root group stays whole from the first forward to the end of the backward.
        root_gather_s=gather(loads.root_parameter_bytes, root_gathers),
        root_reduce_s=reduce(loads.root_gradient_bytes, reductions),
        root_replicate_s=replicate(loads.root_gradient_bytes, 1),
    )


def communication_error(plan: Plan, cluster: ClusterProfile) -> float:
    """Half-width of the range of communication time, as a fraction."""
    groups = [shard_group(plan), replica_group(plan), (plan.tp, 1), (plan.cp, plan.tp)]
    if plan.pp > 1:
        groups.append((plan.pp, plan.world_size // plan.pp))
    errors = []
    for size, stride in groups:
        if size < 2:
            continue
        link = cluster.link(size, stride)
        fits = [
            cluster.measured(kind, size, stride) or link.fits.get(kind) for kind in _sent_by(plan)
        ]
        misses = [fit.relative_residual for fit in fits if fit is not None]
        errors.append(max(misses) if misses else link.bandwidth_bytes_per_s.relative_error)
    return hypot(COMMUNICATION_ERROR, max(errors, default=0.0))


def _sent_by(plan: Plan) -> tuple[Collective, ...]:
    """What moves a plan's parameters and gradients."""
    if plan.is_replicated:
        is_backend = plan.aggregation is Aggregation.BACKEND
        return (Collective.ALL_REDUCE if is_backend else Collective.SEND_RECV,)
    rings = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    is_hybrid = plan.data_parallel is DataParallel.HYBRID_SHARD
    return (*rings, Collective.ALL_REDUCE) if is_hybrid else rings
