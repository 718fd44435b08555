"""Communication: a plan's traffic in a step, unit by unit, and its time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, hypot

from advisor.cost.communication.aggregation import buffer_share, slowest, steps
from advisor.cost.communication.compression import Sent
from advisor.cost.communication.groups import replica_group, shard_group
from advisor.cost.communication.sharded import Sharded
from advisor.cost.ledger import Ledger
from advisor.cost.load.loads import Loads, ends_of
from advisor.cost.load.unit_load import UnitLoad
from advisor.cost.memory.peak import KEEPS_PARAMETERS
from engines.plan import Aggregation, DataParallel, Plan, Recompute, Schedule
from profiles.machine.cluster import ClusterProfile, Collective
from profiles.units import MIB
from profiles.workload.stack import TORCH, Selective, Stack

# DDP's first bucket is small, so that communication starts early
# (dist._DEFAULT_FIRST_BUCKET_BYTES), unless the bucket size is given.
FIRST_BUCKET_BYTES = 2**20
# Error of latency + bytes/bandwidth against real collectives, in addition to its inputs' errors.
# Published busbw of one link differs by this much between ring and tree (8 H200: 367 and 480 GB/s
# of all-reduce; ml-engineering network).
COMMUNICATION_ERROR = 0.25


@dataclass(frozen=True, slots=True)
class Exchange:
    """Seconds of a plan's collectives for each entry of the loads, per unit and microbatch.

    Attributes:
        gather_s: of each unit's parameters before its forward or backward.
        reduce_s: of each unit's gradients inside the shard group.
        replicate_s: of each unit's gradients (or shards) between replicas.
        tensor_forward_s, tensor_backward_s, tensor_again_s: among the ranks of the tp axis, in a
            forward, a backward, and a recomputed forward.
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
    """Receive buffer of a gradient bucket, if messages are summed by the engine."""
    group, stride = replica_group(plan)
    per_node = cluster.ranks_per_node(group, stride)
    share = buffer_share(plan.aggregation, group, per_node=per_node)
    return share * min(replicas.total_bytes, plan.bucket_mib * MIB)


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
    """Collectives of `plan` for parameters, gradients and activations of `loads` in one step.

    Without stages; see `stage_exchange`. `sent` are the replicas' gradients; `reduced_share` of
    their bytes go over the links. `stack` determines the dispatch of tokens to experts.
    """
    inside = _inside(plan, loads, ledger, stack=stack)
    if plan.is_replicated:
        total = loads.common_gradient_bytes
        whole, last = replicas_s(plan, total, ledger, sent, reduced_share=reduced_share)
        # A bucket's latency is shared by the units in it; the last is full when the backward ends.
        each = _of_entries(
            loads, lambda unit: (whole - last) * (unit.gradient_bytes - unit.expert_bytes) / total
        )
        return replace(inside, replicate_s=each, root_replicate_s=last)
    if plan.data_parallel.is_sharded:
        return _shards(
            inside,
            plan,
            loads,
            ledger,
            has_host=has_host,
            root_gathers=plan.forwards,
            reductions=plan.forwards,
            reduced_share=reduced_share,
            stack=stack,
        )
    return inside


def stage_exchange(
    plan: Plan,
    loads: Loads,
    ledger: Ledger,
    *,
    has_host: bool,
    reduced_share: float = 1.0,
    stack: Stack = TORCH,
) -> Exchange:
    """Collectives of one pipeline stage.

    FSDP2 gathers units as without stages, the root group once a round; it reduces when a round is
    over, ZeRO-1 after the last one.
    """
    inside = _inside(plan, loads, ledger, stack=stack)
    if not plan.data_parallel.is_sharded:
        return inside
    return _shards(
        inside,
        plan,
        loads,
        ledger,
        has_host=has_host,
        root_gathers=rounds_of(plan),
        reductions=rounds_of(plan),
        reduced_share=reduced_share,
        stack=stack,
    )


def rounds_of(plan: Plan) -> int:
    """Rounds per step in which the pipeline fills and drains; one per microbatch for naive."""
    return plan.forwards if plan.schedule is Schedule.NAIVE else plan.accumulation


def _distinct(ledger: Ledger, group: int, stride: int, copies: float) -> float:
    """Share of a token's copies with distinct destination nodes, or ranks if there is one node,
    with experts drawn uniformly."""
    nodes = ceil(group / ledger.ranks_per_node(group, stride))
    places = nodes if nodes > 1 else group
    return float(places * (1 - (1 - 1 / places) ** copies) / copies)


def _runs_again(plan: Plan, unit: UnitLoad, stack: Stack) -> bool:
    """Return True if recompute repeats a unit's collectives; attention's core has none."""
    if plan.recompute is Recompute.SELECTIVE and stack.selective is Selective.CORE:
        return False
    return unit.runs_again(plan.recompute)


@dataclass(frozen=True, slots=True)
class InUnits:
    """Seconds of the collectives inside each entry, per unit: in a forward, in a backward, and in a
    recomputed forward."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    again_s: tuple[float, ...]


def in_units(plan: Plan, loads: Loads, ledger: Ledger, *, stack: Stack) -> InUnits:
    """Collectives along tp, cp and ep, all exposed. Recompute repeats those of forwards."""
    groups = {
        "tp": (plan.tp, 1),
        "cp": (plan.cp, plan.tp),
        "ep": (plan.ep, 1 if stack.folds_experts else plan.cp * plan.tp),
    }
    sums: list[tuple[float, float, float]] = []
    for unit in loads.runs:
        forward = backward = again = 0.0
        runs_again = _runs_again(plan, unit, stack)
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
            forward += seconds * each.in_forward
            backward += seconds * (not each.in_forward)
            again += seconds * repeats
        sums += [(forward, backward, again)] * len(ends_of(unit.count))
    return InUnits(*(tuple(column) for column in zip(*sums, strict=True)))


def _inside(plan: Plan, loads: Loads, ledger: Ledger, *, stack: Stack) -> Exchange:
    """Exchange inside units alone."""
    inside = in_units(plan, loads, ledger, stack=stack)
    zeros = (0.0,) * len(inside.forward_s)
    return Exchange(zeros, zeros, zeros, inside.forward_s, inside.backward_s, inside.again_s)


def replicas_s(
    plan: Plan, gradient_bytes: float, ledger: Ledger, sent: Sent, *, reduced_share: float
) -> tuple[float, float]:
    """DDP: seconds to all-reduce all gradients once per step, in buckets overlapped with the
    backward, after compression; and those of the last bucket."""
    bucket_bytes = plan.bucket_mib * MIB
    is_named = plan.said("bucket_mib")
    first = min(gradient_bytes, bucket_bytes if is_named else FIRST_BUCKET_BYTES)
    rest = gradient_bytes - first
    buckets = ceil(rest / bucket_bytes)
    sizes = [(first, 1), (rest / buckets, buckets)] if buckets else [(first, 1)]
    whole, last = sent.work_s, 0.0
    for bucket, count in sizes:
        last = 0.0
        for sum_bytes in sent.sums_bytes:
            payload = reduced_share * bucket * sum_bytes / gradient_bytes
            last += _summed(plan, payload, ledger, count=count)
        whole += count * last
    return whole, last


def _summed(plan: Plan, payload: float, ledger: Ledger, *, count: int) -> float:
    """Seconds of an all-reduce over the replicas: a collective, or the messages that it is made
    of."""
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
            stride=load.stride * stride,
            count=count * step.rounds,
        )
    return seconds


def _shards(
    inside: Exchange,
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
    """Add shard collectives: ZeRO-1 and ZeRO-2 gather once a step, ZeRO-3 before each forward and
    backward. ZeRO-1 reduces once a step. HSDP adds an all-reduce of gradient shards per step.

    Args:
        root_gathers, reductions: in a step, of plans that gather and reduce more than once.
    """
    kind = plan.data_parallel
    gathers = 2 * plan.forwards
    if kind in KEEPS_PARAMETERS:
        gathers = root_gathers = 1
    if kind is DataParallel.ZERO1:
        reductions = 1
    sharded = Sharded.of(
        plan,
        compute_share=loads.compute_share,
        reduced_share=reduced_share,
        has_host=has_host,
        stack=stack,
    )

    def each(seconds: Callable[[UnitLoad], float]) -> tuple[float, ...]:
        return _of_entries(loads, lambda unit: seconds(unit) if unit.is_separate else 0.0)

    return replace(
        inside,
        gather_s=each(
            lambda u: sharded.gather_s(
                ledger, u.parameter_bytes, u.expert_bytes, count=gathers * u.count
            )
        ),
        reduce_s=each(
            lambda u: sharded.reduce_s(
                ledger, u.gradient_bytes, u.expert_bytes, count=reductions * u.count
            )
        ),
        replicate_s=each(lambda u: sharded.replicate_s(ledger, u.gradient_bytes, count=u.count)),
        # The root group stays gathered from the first forward to the end of the backward.
        root_gather_s=sharded.gather_s(ledger, loads.root_parameter_bytes, count=root_gathers),
        root_reduce_s=sharded.reduce_s(ledger, loads.root_gradient_bytes, count=reductions),
        root_replicate_s=sharded.replicate_s(ledger, loads.root_gradient_bytes),
    )


def _of_entries(loads: Loads, amount: Callable[[UnitLoad], float]) -> tuple[float, ...]:
    """An amount of each run, repeated for each of its entries."""
    return tuple(value for run in loads.runs for value in [amount(run)] * len(ends_of(run.count)))


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
    """Collectives of a plan's parameters and gradients."""
    if plan.is_replicated:
        is_backend = plan.aggregation is Aggregation.BACKEND
        return (Collective.ALL_REDUCE if is_backend else Collective.SEND_RECV,)
    rings = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    is_hybrid = plan.data_parallel is DataParallel.HYBRID_SHARD
    return (*rings, Collective.ALL_REDUCE) if is_hybrid else rings
