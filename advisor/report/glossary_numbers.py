"""Values of glossary terms for a plan, computed from the decision alone."""

from __future__ import annotations

from collections.abc import Callable

from advisor.decide.comparison import cuts, kind_words, recomputed_blocks, title
from advisor.decide.decision import Decision
from advisor.decide.large_batch import LATE_LOSS, batch_advice, critical_tokens, noise_scale
from advisor.decide.reserved import reserved_bytes
from engines.plan import AXES, DataParallel, Offload, Plan, Recompute, Updates, format_setting
from profiles.machine.cluster import Collective, Link
from profiles.units import (
    format_bandwidth,
    format_count,
    format_flop_rate,
    format_gib,
    format_percent,
    format_seconds,
)

Number = Callable[[Decision], str | None]


def number_of(name: str, decision: Decision) -> str | None:
    """Format the value of a term; None for a term without one."""
    number = _NUMBERS.get(name)
    return None if number is None else number(decision)


def _ranks(decision: Decision) -> str:
    return _numbered("rank", decision.plan.world_size)


def _numbered(name: str, count: int) -> str:
    return f"{name}s 0 to {count - 1}" if count > 1 else f"{name} 0 alone"


def _local_world(decision: Decision) -> int:
    return min(decision.plan.world_size, decision.facts.cluster.devices_per_node)


def _nodes(decision: Decision) -> str:
    cluster = decision.facts.cluster
    plural = "s" if cluster.num_nodes > 1 else ""
    return (
        f"{cluster.num_nodes} node{plural}, {cluster.devices_per_node} x {cluster.device.name} each"
    )


def _accelerator(decision: Decision) -> str:
    device = decision.facts.cluster.device
    peak = (
        device.flop_per_s.get(decision.plan.precision.product_dtype) or device.flop_per_s["float32"]
    )
    usable = format_gib(decision.policy.usable_bytes(device))
    return f"{device.name}: {usable} usable, {format_flop_rate(peak.value)} at its peak"


def _mesh(decision: Decision) -> str:
    spare_ranks = decision.plan.said("backup_workers", "servers").split()
    axes = decision.plan.said(*AXES).replace(" ", " x ")
    return " + ".join([axes or "one rank", *spare_ranks])


def _groups(decision: Decision) -> str | None:
    plan = decision.plan
    said = [
        f"{plan.world_size // size} of {size} ranks along {axis}"
        for axis in AXES
        for size in [getattr(plan, axis)]
        if size > 1
    ]
    return ", ".join(said) or None


def _link(link: Link | None, where: str) -> str:
    if link is None:
        return f"no links {where}"
    return f"{where}: {link.name}, {format_bandwidth(link.bandwidth_bytes_per_s.value)}"


def _in_node(decision: Decision) -> str:
    return _link(decision.facts.cluster.intra, "in the node")


def _between_nodes(decision: Decision) -> str:
    return _link(decision.facts.cluster.inter, "between nodes")


def _latency(decision: Decision) -> str | None:
    cluster = decision.facts.cluster
    said = [
        f"{format_seconds(link.latency_s.value)} {where}"
        for where, link in (("in the node", cluster.intra), ("between nodes", cluster.inter))
        if link is not None
    ]
    return ", ".join(said) or None


def _manual_placement(decision: Decision) -> str:
    model = decision.facts.model
    if not model.devices:
        return f"{model.name} is in one piece"
    copies = [t for t in decision.estimate.traffic if t.stride == 0]
    waited = format_seconds(sum(copy.seconds for copy in copies))
    return f"parts on {' and '.join(model.devices)}, {waited} of a step between them"


def _axis(name: str) -> Number:
    return lambda decision: f"{name}={getattr(decision.plan, name)}"


def _kinds(*kinds: DataParallel) -> Number:
    """Plan's data parallelism if it is of these kinds, else why the best plan of them was
    rejected."""

    def number(decision: Decision) -> str:
        if decision.plan.data_parallel in kinds and decision.plan.updates_in_step:
            return f"this plan: {title(decision.plan)}"
        for other in decision.alternatives:
            if other.plan.data_parallel in kinds:
                return f"not taken, {other.title}: {other.because}"
        return f"not taken; this plan is {title(decision.plan)}"

    return number


def _model_parallel(decision: Decision) -> str:
    plan = decision.plan
    parts = plan.pp * plan.tp * plan.cp
    return f"a replica spans {parts} devices" if parts > 1 else "a replica is on one device"


def _replicas(decision: Decision) -> str:
    plan = decision.plan
    samples = decision.facts.workload.global_batch_size // plan.data_degree
    return f"{plan.data_degree}, {samples} samples of each step for each"


def _reducing_ranks(plan: Plan) -> int:
    """Number of ranks that reduce a parameter's gradient; cp ranks hold different tokens."""
    return plan.data_degree * plan.cp


def _shards(decision: Decision) -> str:
    plan = decision.plan
    if not plan.data_parallel.is_sharded:
        return "none: no state is sharded over replicas"
    shards = plan.dp_shard * plan.cp if plan.dp_shard > 1 else _reducing_ranks(plan)
    return f"{shards} of each state"


def _stages(decision: Decision) -> str:
    plan = decision.plan
    if plan.pp == 1:
        return "one, the whole model"
    first = ", ".join(f"`{name}`" for name in plan.stages)
    return f"{len(plan.stages) + 1} on {plan.pp} ranks" + (f", cut before {first}" if first else "")


def _bubble(decision: Decision) -> str:
    if decision.plan.pp == 1:
        return "none: there is one stage"
    time = decision.estimate.time
    return (
        f"{format_percent(time.idle_s / decision.estimate.step_s)} of the step,"
        f" {format_seconds(time.idle_s)} of the rank that works most"
    )


def _schedule(decision: Decision) -> str:
    return decision.plan.schedule.value if decision.plan.schedule else "none: there is one stage"


def _traffic_of(kind: Collective) -> Number:
    def number(decision: Decision) -> str:
        charged = [traffic for traffic in decision.estimate.traffic if traffic.kind is kind]
        if not charged:
            return "none in this plan"
        calls = sum(traffic.count for traffic in charged)
        sent = sum(traffic.bus_bytes for traffic in charged)
        seconds = sum(traffic.seconds for traffic in charged)
        around = "" if kind is Collective.SEND_RECV else ", as a ring puts them there"
        return (
            f"{calls:,} a step, {format_gib(sent)} on each rank's link{around};"
            f" {format_seconds(seconds)} if nothing else ran"
        )

    return number


def _ring(decision: Decision) -> str:
    n = _reducing_ranks(decision.plan)
    if n == 1:
        return "none: one rank has all gradients"
    factor = Collective.ALL_REDUCE.bus_factor(n)
    return f"2 (n - 1) / n = {factor:.4g} times the gradients, n = {n}"


def _server(decision: Decision) -> str | None:
    """Traffic of a parameter server's link, next to a ring's per-rank traffic."""
    plan = decision.plan
    n = plan.data_degree + plan.backup_workers
    if n == 1:
        return None
    size = sum(unit.gradient_bytes for unit in decision.facts.model.units)
    carried = format_gib(n * size / max(1, plan.servers))
    would = "would carry"
    if plan.servers:
        would = "carries" if plan.servers == 1 else f"carries, as those of all {plan.servers},"
    ring = format_gib(Collective.ALL_REDUCE.bus_factor(n) * size)
    over = " over the ranks of each replica" if plan.pp * plan.tp * plan.cp > 1 else ""
    return (
        f"its link {would} {carried} in and as much out, {n} workers' gradients and parameters;"
        f" a ring {ring}{over}"
    )


def _setting(*names: str) -> Number:
    """Settings of the plan, in the syntax of `--plan`."""
    return lambda decision: " ".join(
        f"{name}={format_setting(getattr(decision.plan, name))}" for name in names
    )


def _staleness(decision: Decision) -> str:
    plan = decision.plan
    if plan.updates is Updates.ASYNCHRONOUS:
        bound = "no bound" if plan.max_staleness is None else f"at most {plan.max_staleness} steps"
        return f"some {plan.dp_replicate - 1} updates a gradient, {bound} ahead of the slowest"
    if plan.updates is Updates.SYNCHRONOUS:
        return "none: gradients are of the parameters that they update"
    return f"up to {plan.sync_every} steps of the other replicas"


def _busbw(decision: Decision) -> str | None:
    plan, cluster = decision.plan, decision.facts.cluster
    ranks = _reducing_ranks(plan)
    if ranks == 1:
        return None
    rate = cluster.group_bandwidth(ranks, plan.tp).value
    return f"{format_bandwidth(rate)} where gradients are summed ({ranks} ranks)"


def _exposed(decision: Decision) -> str:
    time = decision.estimate.time
    step, hidden = format_seconds(decision.estimate.step_s), format_seconds(time.overlapped_s)
    return f"{format_seconds(time.exposed_s)} of {step}; hidden {hidden}"


def _states(decision: Decision) -> str:
    return (
        f"{format_gib(decision.estimate.states_bytes)} a device when the optimizer steps,"
        f" {decision.facts.workload.optimizer.name}"
    )


def _peak(decision: Decision) -> str:
    estimate = decision.estimate
    usable = decision.policy.usable_bytes(decision.facts.cluster.device)
    low, high = format_gib(estimate.peak_low_bytes), format_gib(estimate.peak_high_bytes)
    peak = f"{format_gib(estimate.peak_bytes)} ({low} to {high})"
    return f"{peak} of {format_gib(usable)} usable, in the {estimate.phase}"


def _recompute(decision: Decision) -> str:
    extra = format_seconds(decision.estimate.time.recompute_s)
    plan = decision.plan
    words = "none" if plan.recompute is Recompute.NONE else recomputed_blocks(plan)
    return f"{words}, {extra} a step"


def _offload(decision: Decision) -> str:
    if decision.plan.offload is Offload.NONE:
        return "none"
    estimate = decision.estimate
    moved = format_seconds(estimate.time.host_s)
    where = f"{format_gib(estimate.host_bytes)} a rank in main memory"
    if estimate.disk_bytes:
        where = f"{format_gib(estimate.disk_bytes)} a rank on disk"
    return f"{decision.plan.offload.value}: {where}; transfers cost {moved} a step"


def _reserved(decision: Decision) -> str:
    reserved, peak = reserved_bytes(decision), decision.estimate.peak_bytes
    return f"{format_gib(reserved)} reserved for a peak of {format_gib(peak)}"


def _batch(decision: Decision) -> str:
    plan = decision.plan
    parts = (
        f"{plan.microbatch_size} x {_plural(plan.forwards, 'forward')}"
        f" x {_plural(plan.data_degree, 'replica')}"
    )
    return f"{next(batch_advice(decision.facts).lines())} ({parts})"


def _epoch(decision: Decision) -> str:
    steps = batch_advice(decision.facts).steps_per_epoch
    return "give `--samples`, the size of the data set" if steps is None else f"{steps:,}"


def _rate(decision: Decision) -> str:
    return list(batch_advice(decision.facts).lines())[1]


def _warm_up(decision: Decision) -> str:
    steps = batch_advice(decision.facts).warm_up_steps
    name = decision.facts.workload.optimizer.name
    return f"five epochs of {name}" if steps is None else f"{steps:,} steps of {name}"


def _noise(decision: Decision) -> str:
    work = decision.facts.workload
    if work.dataset_samples is None:
        return "give `--samples`, the size of the data set"
    if work.global_batch_size >= work.dataset_samples:
        return "none: a step has the whole data set"
    of_rate_1 = noise_scale(1.0, samples=work.dataset_samples, batch=work.global_batch_size)
    return f"N / B - 1 = {of_rate_1:,.1f}, times rate / (1 - momentum)"


def _critical(decision: Decision) -> str:
    work, tokens = decision.facts.workload, decision.facts.tokens_per_sample
    if work.critical_batch_size is not None:
        measured, batch = work.critical_batch_size, work.global_batch_size
        return f"{measured:,.0f} samples, measured; the batch is {batch:,}"
    if tokens is None:
        return "not measured"
    share = critical_tokens(LATE_LOSS) / tokens
    return f"not measured; some {share:,.0f} samples at a loss of {LATE_LOSS} (Kaplan et al. 2020)"


def _large(decision: Decision) -> str:
    return " ".join(batch_advice(decision.facts).warnings) or (
        f"{decision.facts.workload.global_batch_size:,} samples are within what was reported"
    )


def _throughput(decision: Decision) -> str:
    estimate = decision.estimate
    tokens = (
        "" if estimate.tokens_per_s is None else f", {format_count(estimate.tokens_per_s)} tokens/s"
    )
    return f"{estimate.samples_per_s:.1f} samples/s{tokens}"


def _step(decision: Decision) -> str:
    estimate = decision.estimate
    low, high = format_seconds(estimate.step_low_s), format_seconds(estimate.step_high_s)
    return f"{format_seconds(estimate.step_s)} ({low} to {high})"


def _tree(decision: Decision) -> str:
    return decision.trace.advice


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


_NUMBERS: dict[str, Number] = {
    "node": _nodes,
    "accelerator": _accelerator,
    "rank": _ranks,
    "world size": lambda d: f"W = {d.plan.world_size}: {_mesh(d)}",
    "local world size": lambda d: f"L = {_local_world(d)}",
    "global rank": _ranks,
    "local rank": lambda d: _numbered("local rank", _local_world(d)),
    "process group": _groups,
    "mesh": _mesh,
    "NVLink": _in_node,
    "PCIe": _in_node,
    "InfiniBand": _between_nodes,
    "latency": _latency,
    "data parallelism": _replicas,
    "DP": _kinds(DataParallel.THREADS),
    "DDP": _kinds(DataParallel.REPLICATE),
    "sharded DDP": _kinds(DataParallel.ZERO1, DataParallel.ZERO2, DataParallel.FULL_SHARD),
    "ZeRO": _kinds(DataParallel.ZERO1, DataParallel.ZERO2, DataParallel.FULL_SHARD),
    "ZeRO-1": _kinds(DataParallel.ZERO1),
    "ZeRO-2": _kinds(DataParallel.ZERO2),
    "ZeRO-3": _kinds(DataParallel.FULL_SHARD),
    "FSDP": _kinds(DataParallel.FULL_SHARD),
    "HSDP": _kinds(DataParallel.HYBRID_SHARD),
    "model parallelism": _model_parallel,
    "model parallelism by hand": _manual_placement,
    "tensor parallelism": _axis("tp"),
    "horizontal": _axis("tp"),
    "vertical": _axis("pp"),
    "pipeline parallelism": _axis("pp"),
    "hybrid parallelism": lambda d: kind_words(d.plan),
    "context parallelism": _axis("cp"),
    "expert parallelism": _axis("ep"),
    "replica": _replicas,
    "shard": _shards,
    "stage": _stages,
    "schedule": _schedule,
    "bubble": _bubble,
    "microbatch": lambda d: cuts(d.plan),
    "all-reduce": _traffic_of(Collective.ALL_REDUCE),
    "all-gather": _traffic_of(Collective.ALL_GATHER),
    "reduce-scatter": _traffic_of(Collective.REDUCE_SCATTER),
    "all-to-all": _traffic_of(Collective.ALL_TO_ALL),
    "send and receive": _traffic_of(Collective.SEND_RECV),
    "ring all-reduce": _ring,
    "gradient aggregation": _setting("aggregation"),
    "hierarchical all-reduce": _setting("aggregation"),
    "chunked loss": _setting("loss_chunks"),
    "mixed precision": _setting("precision"),
    "loss scaling": _setting("precision"),
    "synchronised batch norm": _setting("sync_batch_norm"),
    "gradient compression": _setting("compression"),
    "synchronous update": _setting("updates"),
    "asynchronous update": _setting("updates"),
    "parameter server": _server,
    "staleness": _staleness,
    "backup workers": _setting("backup_workers"),
    "local SGD": _setting("updates", "sync_every"),
    "DiLoCo": _setting("updates", "sync_every"),
    "busbw": _busbw,
    "exposed communication": _exposed,
    "model states": _states,
    "activations": lambda d: f"{format_gib(d.estimate.memory.activations)} at the peak",
    "recompute": _recompute,
    "offload": _offload,
    "peak": _peak,
    "fits": _peak,
    "fragmentation": _reserved,
    "global batch": _batch,
    "accumulation": lambda d: f"{_plural(d.plan.accumulation, 'round')} a step",
    "steps per epoch": _epoch,
    "learning rate scaling": _rate,
    "warm-up": _warm_up,
    "noise scale": _noise,
    "gradient noise scale": _critical,
    "critical batch": _critical,
    "large batch": _large,
    "step": _step,
    "throughput": _throughput,
    "MFU": lambda d: format_percent(d.estimate.mfu),
    "plan": lambda d: str(d.plan),
    "decision tree": _tree,
    "dissent": lambda d: d.dissent or "none",
}
