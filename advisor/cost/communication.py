"""Communication: what a plan sends in a step, unit by unit, and the seconds of it."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, hypot

from advisor.cost.breakdown import Traffic
from advisor.cost.collective import collective_s
from advisor.cost.loads import Loads
from advisor.cost.memory import shard_degree
from engines.plan import DataParallel, Offload, Plan
from profiles.cluster import ClusterProfile, Collective
from profiles.model import ModelProfile

# DDP's default buckets (bucket_cap_mb=25, in the MiB that it means). The first is small, so that
# something is sent early (dist._DEFAULT_FIRST_BUCKET_BYTES).
BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 * 2**20, 2**20
# What the ranks count is two fp64 numbers (samples, ranks that failed); a loss is one fp32 number.
COUNT_BYTES, SCALAR_BYTES = 16, 4
# A device's share of its own PCIe 4.0 x16 slot: 31 GB/s nominal (ml-engineering), of which eight
# devices at once reach 24 (NVIDIA GTC S62129). Assumed: no profile measures the way to the host.
HOST_LINK_BYTES_PER_S = 24e9
# How far latency + bytes/bandwidth is from a real collective, beside the errors of its inputs.
# Published busbw of one link differs by this much between ring and tree (8 H200: 367 and 480 GB/s
# of all-reduce; ml-engineering network).
COMMUNICATION_ERROR = 0.25


@dataclass(frozen=True, slots=True)
class Exchange:
    """Seconds of a plan's collectives, unit by unit, and what they are.

    Attributes:
        gather_s: of each unit's parameters before its forward or backward.
        reduce_s: of each unit's gradients inside the shard group.
        replicate_s: of each unit's gradients (or shards) between replicas.
        root_gather_s, root_reduce_s, root_replicate_s: the same for the root group.
        apart_s: small collectives that nothing hides, all of a step.
        traffic: everything, as it is charged.
        host_bytes: to and from main memory in a step.
    """

    gather_s: tuple[float, ...]
    reduce_s: tuple[float, ...]
    replicate_s: tuple[float, ...]
    root_gather_s: float
    root_reduce_s: float
    root_replicate_s: float
    apart_s: float
    traffic: tuple[Traffic, ...]
    host_bytes: float = 0.0

    @property
    def host_s(self) -> float:
        """Seconds of a step that transfers to and from main memory take, hidden or not."""
        return self.host_bytes / HOST_LINK_BYTES_PER_S


class _Ledger:
    """Adds up equal collectives while a plan is walked through."""

    def __init__(self, cluster: ClusterProfile) -> None:
        self._cluster = cluster
        self._counts: dict[tuple[Collective, str, float, int, int], int] = {}
        self._seconds: dict[tuple[Collective, float, int, int], float] = {}

    def charge(
        self,
        kind: Collective,
        purpose: str,
        payload_bytes: float,
        *,
        group_size: int,
        stride: int = 1,
        count: int = 1,
    ) -> float:
        """Note `count` collectives; the seconds of one."""
        if group_size < 2 or count == 0 or payload_bytes == 0:
            return 0.0
        key = (kind, purpose, payload_bytes, group_size, stride)
        self._counts[key] = self._counts.get(key, 0) + count
        shape = (kind, payload_bytes, group_size, stride)
        if shape not in self._seconds:
            self._seconds[shape] = collective_s(
                self._cluster, kind, payload_bytes, group_size=group_size, stride=stride
            )
        return self._seconds[shape]

    def traffic(self) -> tuple[Traffic, ...]:
        return tuple(
            Traffic(
                kind=kind,
                purpose=purpose,
                payload_bytes=payload,
                count=count,
                group_size=group,
                stride=stride,
                link=self._cluster.link(group, stride).name,
                seconds=count * self._seconds[(kind, payload, group, stride)],
            )
            for (kind, purpose, payload, group, stride), count in self._counts.items()
        )


def exchange(plan: Plan, loads: Loads, *, model: ModelProfile, cluster: ClusterProfile) -> Exchange:
    """Everything that `plan` sends in one step."""
    ledger = _Ledger(cluster)
    units, kind = loads.units, plan.data_parallel
    zeros = (0.0,) * len(units)
    found = Exchange(zeros, zeros, zeros, 0.0, 0.0, 0.0, 0.0, ())
    if kind is DataParallel.REPLICATE:
        found = _replicas(plan, loads, ledger)
    elif kind.is_sharded:
        found = _shards(plan, loads, ledger, has_host=cluster.device.kind != "cpu")
    apart = _apart(plan, model, ledger)
    return Exchange(
        gather_s=found.gather_s,
        reduce_s=found.reduce_s,
        replicate_s=found.replicate_s,
        root_gather_s=found.root_gather_s,
        root_reduce_s=found.root_reduce_s,
        root_replicate_s=found.root_replicate_s,
        apart_s=apart,
        traffic=ledger.traffic(),
        host_bytes=found.host_bytes,
    )


def _replicas(plan: Plan, loads: Loads, ledger: _Ledger) -> Exchange:
    """DDP: all gradients once per step, in buckets that fill as the backward goes.

    A bucket's latency is shared by the units in it.
    """
    total = loads.gradient_bytes
    first = min(total, FIRST_BUCKET_BYTES)
    buckets = ceil((total - first) / BUCKET_BYTES)

    def reduce(payload: float, count: int) -> float:
        return count * ledger.charge(
            Collective.ALL_REDUCE,
            "gradients",
            payload,
            group_size=plan.dp_replicate,
            count=count,
        )

    whole = reduce(first, 1) + (reduce((total - first) / buckets, buckets) if buckets else 0.0)
    seconds = tuple(whole * unit.gradient_bytes / total for unit in loads.units)
    zeros = (0.0,) * len(loads.units)
    return Exchange(zeros, zeros, seconds, 0.0, 0.0, 0.0, 0.0, ())


def _shards(plan: Plan, loads: Loads, ledger: _Ledger, *, has_host: bool) -> Exchange:
    """FSDP2: gathers in the dtype of computing, reductions in the dtype of the masters.

    ZeRO-1 and ZeRO-2 gather once a step; ZeRO-3 before each forward and backward. ZeRO-1 reduces
    once a step, the others every microbatch. HSDP adds one all-reduce of gradient shards a step.
    """
    kind, group = plan.data_parallel, shard_degree(plan)
    once = kind in (DataParallel.ZERO1, DataParallel.ZERO2)
    reductions = 1 if kind is DataParallel.ZERO1 else plan.forwards
    offloads = plan.offload is Offload.STATES and has_host
    host_bytes = 0.0

    def gather(payload: float, times: int) -> float:
        nonlocal host_bytes
        seconds = ledger.charge(
            Collective.ALL_GATHER,
            "parameters",
            payload * loads.compute_share,
            group_size=group,
            count=times,
        )
        if offloads:
            host_bytes += times * payload / group
            seconds += payload / group / HOST_LINK_BYTES_PER_S
        return seconds

    def reduce(payload: float) -> float:
        nonlocal host_bytes
        seconds = ledger.charge(
            Collective.REDUCE_SCATTER, "gradients", payload, group_size=group, count=reductions
        )
        if offloads:
            host_bytes += reductions * payload / group
            seconds += payload / group / HOST_LINK_BYTES_PER_S
        return seconds

    def replicate(payload: float) -> float:
        if kind is not DataParallel.HYBRID_SHARD:
            return 0.0
        return ledger.charge(
            Collective.ALL_REDUCE,
            "gradient shards",
            payload / group,
            group_size=plan.dp_replicate,
            stride=plan.dp_shard,
        )

    times = 1 if once else 2 * plan.forwards
    separate = [u if u.is_separate else None for u in loads.units]
    gathers = tuple(gather(u.parameter_bytes, times) if u else 0.0 for u in separate)
    reduces = tuple(reduce(u.gradient_bytes) if u else 0.0 for u in separate)
    between = tuple(replicate(u.gradient_bytes) if u else 0.0 for u in separate)
    # The root group stays whole from the first forward to the end of the backward.
    root_gather = gather(loads.root_parameter_bytes, 1 if once else plan.forwards)
    root_reduce = reduce(loads.root_gradient_bytes)
    root_between = replicate(loads.root_gradient_bytes)
    return Exchange(
        gathers, reduces, between, root_gather, root_reduce, root_between, 0.0, (), host_bytes
    )


def _apart(plan: Plan, model: ModelProfile, ledger: _Ledger) -> float:
    """Sample count and loss of every step, what DDP asks about unused parameters, batch norms."""
    group = plan.data_degree
    seconds = sum(
        ledger.charge(Collective.ALL_REDUCE, purpose, payload, group_size=group)
        for purpose, payload in (("sample count", COUNT_BYTES), ("loss", SCALAR_BYTES))
    )
    if model.unused and plan.data_parallel is DataParallel.REPLICATE:
        # One number per parameter tensor; a profile does not count those, and latency is all of it.
        seconds += ledger.charge(
            Collective.ALL_REDUCE, "unused parameters", SCALAR_BYTES, group_size=group
        )
    if not model.batch_norms or group < 2:
        return seconds
    if plan.sync_batch_norm:
        # Mean and variance with the forward, their gradients with the backward.
        count = 2 * len(model.batch_norms) * plan.forwards
        one = ledger.charge(
            Collective.ALL_REDUCE,
            "batch norm statistics",
            model.buffer_bytes / len(model.batch_norms),
            group_size=group,
            count=count,
        )
        return seconds + count * one
    one = ledger.charge(
        Collective.SEND_RECV, "buffers (broadcast)", model.buffer_bytes, group_size=group
    )
    return seconds + one


def communication_error(plan: Plan, cluster: ClusterProfile) -> float:
    """Half-width of the range of communication time, as a fraction."""
    groups = [(shard_degree(plan), 1), (plan.dp_replicate, plan.dp_shard)]
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
    if plan.data_parallel is DataParallel.REPLICATE:
        return (Collective.ALL_REDUCE,)
    rings = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    is_hybrid = plan.data_parallel is DataParallel.HYBRID_SHARD
    return (*rings, Collective.ALL_REDUCE) if is_hybrid else rings
