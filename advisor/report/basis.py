"""Sources of a report's numbers, and hints on how to improve them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from advisor.cost.communication.exchange import COMMUNICATION_ERROR
from advisor.cost.communication.replay import USUAL_OVERLAP
from advisor.cost.compute.unit_times import (
    COMPUTE_ERROR,
    HOST_BANDWIDTH_BYTES_PER_S,
    block_times,
    matmul_fraction,
)
from advisor.cost.ledger import disk_bytes_per_s, host_link_bytes_per_s
from advisor.cost.load.loads import activation_error
from advisor.decide import levers, offload
from advisor.decide.allocator import allocator_hint
from advisor.decide.decision import Decision
from advisor.decide.small_batch import small_batch_hints
from advisor.inputs.stacks import compiled, convolves_in_tf32, is_of_engines, is_preset, summary
from advisor.learning.constants import tier_of
from advisor.search.ranking import (
    Loadable,
    deferred_bytes_per_node,
    load_bytes_per_node,
    loading,
)
from engines.legality import numerics
from engines.plan import Offload, OffloadTo, Plan, Precision
from profiles.machine.cluster import ClusterProfile, Constant, Learned, Link
from profiles.model.profile import ModelProfile
from profiles.model.source import CaptureSource
from profiles.provenance import Quantity, Source
from profiles.record import Record
from profiles.units import (
    format_bandwidth,
    format_flop_rate,
    format_gib,
    format_percent,
    format_seconds,
)
from profiles.workload.new_memory import mapped
from profiles.workload.stack import TORCH
from profiles.workload.workload import Workload

MOST_READS = 3  # lines of code that are named
_ALL = 0.995  # the rest would be printed as 0 %


class Basis(Record):
    """An input or model that the report relies on, and its source."""

    what: str
    source: str


def basis(decision: Decision) -> Iterator[Basis]:
    """Yield machine constants first, then cost models, then the workload."""
    yield from _machine_constants(decision)
    yield from _models(decision)
    yield from _workload(decision)


def _rounds_convolutions(decision: Decision) -> bool:
    facts = decision.facts
    is_plain = decision.plan.precision is Precision.FP32 and facts.model.has_convolutions
    return is_plain and convolves_in_tf32(facts.stack, facts.cluster.device)


def _machine_constants(decision: Decision) -> Iterator[Basis]:
    cluster, device = decision.facts.cluster, decision.facts.cluster.device
    model = decision.facts.model
    learned = cluster.learned or Learned()
    peak = (
        device.flop_per_s.get(decision.plan.precision.product_dtype) or device.flop_per_s["float32"]
    )
    yield Basis(
        what=f"matrix products: {format_percent(matmul_fraction(device))} of"
        f" {format_flop_rate(peak.value)} on {device.name}",
        source=_constant(learned, Constant.PRODUCTS, device.matmul_fraction, peak),
    )
    if _rounds_convolutions(decision):
        rounded = device.flop_per_s["tfloat32"]
        yield Basis(
            what=f"convolutions of fp32: {format_flop_rate(rounded.value)} in TF32, as"
            " `torch.backends.cudnn.allow_tf32` is by default",
            source=_constant(learned, Constant.PRODUCTS, device.matmul_fraction, rounded),
        )
    bandwidth, launch = device.memory_bandwidth_bytes_per_s, device.launch_s
    yield Basis(
        what=f"memory bandwidth: {format_bandwidth(bandwidth.value)}",
        source=_constant(learned, Constant.MEMORY, bandwidth),
    )
    new, shapes = device.new_memory_bytes_per_s, [s for u in model.units for s in u.shapes]
    if new is not None and any(mapped(shape.nbytes) for shape in shapes):
        yield Basis(
            what=f"first writes to new memory, beyond writing: {format_bandwidth(new.value)}",
            source=_sources(new),
        )
    yield Basis(
        what=f"device memory: {format_gib(device.memory_bytes.value)}",
        source=_sources(device.memory_bytes),
    )
    yield Basis(
        what=f"context of a process: {format_gib(device.context_bytes.value)}",
        source=_sources(device.context_bytes) + _runs(learned.context_runs),
    )
    yield Basis(
        what=f"launching an operation: {format_seconds(launch.value)}",
        source=_constant(learned, Constant.LAUNCH, launch),
    )
    for where, link, constant in (
        ("in the node", cluster.intra, Constant.INTRA),
        ("between nodes", cluster.inter, Constant.INTER),
        ("in a rank", cluster.link_in_rank, None),
    ):
        if link is not None:
            runs = _runs(learned.runs.get(constant, 0) if constant else 0)
            yield Basis(what=_link_words(link, where), source=_link_source(link) + runs)
            latency = link.latency_s
            yield Basis(
                what=f"a small message {where}: {format_seconds(latency.value)}",
                source=_sources(latency) + runs,
            )
    memory = cluster.host_memory_bytes
    if memory is not None:
        yield Basis(
            what=f"main memory of a node: {format_gib(memory.value)}", source=_sources(memory)
        )
    yield from _measured_collectives(decision)
    if decision.estimate.time.overlapped_s:
        overlap = cluster.overlap or USUAL_OVERLAP
        computing, sending = overlap.computing, overlap.communication
        yield Basis(
            what=f"at once, computing takes {computing.value:.2f} times as long, sending"
            f" {sending.value:.2f} times",
            source=_sources(computing, sending),
        )
    shared = cluster.shared_cores
    if shared is not None:
        where = "all nodes share cores" if shared.across_nodes else "ranks of a node share cores"
        yield Basis(
            what=f"{where}: one computes {shared.alone.value:.2f} times as fast while others wait",
            source=_sources(shared.alone),
        )
    yield from _offload(decision.plan, cluster)


def _offload(plan: Plan, cluster: ClusterProfile) -> Iterator[Basis]:
    """Yield the host and disk bandwidths that an offloaded plan uses."""
    if plan.offload is Offload.NONE:
        return
    if cluster.device.kind != "cpu":
        link = host_link_bytes_per_s(cluster)
        what, sources = f"way to the host {format_bandwidth(link.value)} a device", [link]
        if plan.offload.states:
            what += f", update at {format_bandwidth(HOST_BANDWIDTH_BYTES_PER_S)} a node"
            sources.append(Quantity(value=HOST_BANDWIDTH_BYTES_PER_S, source=Source.ASSUMED))
        yield Basis(what=what, source=_sources(*sources))
    if plan.offload_to is OffloadTo.DISK:
        written, read = disk_bytes_per_s(cluster)
        yield Basis(
            what=f"a node's disk {format_bandwidth(written.value)} written,"
            f" {format_bandwidth(read.value)} read",
            source=_sources(written, read),
        )


def _measured_collectives(decision: Decision) -> Iterator[Basis]:
    """Yield the measured fits of collectives on exactly this plan's groups."""
    sent, cluster = decision.estimate.traffic, decision.facts.cluster
    runs = (cluster.learned or Learned()).runs
    for kind, size, stride in dict.fromkeys((t.kind, t.group_size, t.stride) for t in sent):
        fit = cluster.measured(kind, size, stride)
        if fit is not None:
            strided = f", {stride} apart" if stride > 1 else ""
            yield Basis(
                what=f"{kind.value} over {size} ranks{strided}:"
                f" {format_bandwidth(fit.busbw_bytes_per_s)} after {format_seconds(fit.latency_s)}",
                source=_source(Source.MEASURED, fit.relative_residual)
                + _runs(runs.get(tier_of(cluster, size, stride), 0)),
            )


def _models(decision: Decision) -> Iterator[Basis]:
    stack = decision.facts.stack
    if decision.plan.compile:
        stack = compiled(stack)
    if stack != TORCH:
        source = "preset" if is_preset(stack) else str(Source.USER)
        yield Basis(what=f"stack {summary(stack)}", source=source)
    yield _activations(decision.facts.model)
    yield from _compute(decision)
    if decision.estimate.traffic:
        yield Basis(
            what="model of communication: latency and bandwidth, one unit prefetched",
            source=_source(Source.ASSUMED, COMMUNICATION_ERROR),
        )
    yield Basis(
        what="steps, rates and memory of plans, and what they need: from all of this",
        source=str(Source.DERIVED),
    )


def _activations(model: ModelProfile) -> Basis:
    """Describe how activations were counted."""
    what = {
        CaptureSource.FAKE: "counted from the model, operation by operation",
        CaptureSource.RUN: "counted in a run on the CPU",
        CaptureSource.PARAMETERS: "guessed from the shapes of parameters alone",
    }.get(model.source, f"counted on {model.source}")
    if model.reads:
        what += ", along the sample's path"
    is_guess = model.source is CaptureSource.PARAMETERS
    source = Source.ASSUMED if is_guess else Source.DERIVED
    return Basis(what=f"activations: {what}", source=_source(source, activation_error(model)))


def _compute(decision: Decision) -> Iterator[Basis]:
    """Yield measured block times, and the roofline for the remaining compute."""
    facts, plan, share = decision.facts, decision.plan, decision.estimate.measured_share
    step = (facts.cluster.learned or Learned()).anchored
    if step is not None:
        yield Basis(
            what=f"each term, as in a step of {step.plan}",
            source=_source(Source.MEASURED, decision.estimate.compute_error),
        )
    if share:
        kind = numerics(plan, facts.model)
        samples = plan.microbatch_size or 1
        times = block_times(facts.model, facts.cluster, kind, samples=samples)
        assert times is not None
        threads = f", {times.threads} thread{'s' if times.threads > 1 else ''}"
        scaled = "" if times.samples == samples else f", scaled to {samples}"
        yield Basis(
            what=f"{format_percent(share)} of computing: blocks timed at {times.samples}"
            f" sample{'s' if times.samples > 1 else ''}{scaled} on {times.processor}"
            + (threads if facts.cluster.device.kind == "cpu" else ""),
            source=_source(Source.MEASURED, decision.estimate.compute_error),
        )
    if share < _ALL:
        yield Basis(
            what="model of computing: roofline of unfused operations",
            source=_source(Source.ASSUMED, COMPUTE_ERROR),
        )


def _workload(decision: Decision) -> Iterator[Basis]:
    """Yield the workload's settings, grouped by source."""
    workload, tokens = decision.facts.workload, decision.facts.tokens_per_sample
    given = {*workload.given, *decision.partial}
    words = {
        "global_batch_size": f"global batch {workload.global_batch_size}",
        "tokens_per_sample": f"{tokens} tokens a sample" if tokens else "",
        "optimizer": workload.optimizer.name,
        "precision": str(decision.plan.precision),
        "host_overhead_s": _host_overhead(workload.host_overhead_s),
        "dataset_samples": _samples(workload.dataset_samples, "in the training set"),
        "critical_batch_size": _samples(workload.critical_batch_size, "are the critical batch"),
        "imbalance": _imbalance(workload),
    }
    sources = {name: _setting_source(name, given) for name, present in words.items() if present}
    if workload.pace_runs:
        sources["imbalance"] = str(Source.MEASURED) + _runs(workload.pace_runs)
    for source in dict.fromkeys(sources.values()):
        present = [words[name] for name, origin in sources.items() if origin == source]
        yield Basis(what=", ".join(present), source=source)
    fixed = " ".join(
        f"{key}={value}"
        for key, value in decision.partial.fixed.items()
        if key not in Plan.model_fields or value != Plan.model_fields[key].default
    )
    if fixed:
        yield Basis(what=f"kept as given: {fixed}", source=str(Source.USER))


def _imbalance(workload: Workload) -> str:
    scatter, straggling, rank = workload.imbalance, workload.straggling, workload.slow_rank
    said = [f"ranks' computing times scatter by {format_percent(scatter)}"] if scatter else []
    if straggling:
        who = "the slowest rank" if rank is None else f"rank {rank}"
        said += [f"{who} computes {format_percent(straggling)} longer than the others"]
    return ", ".join(said)


def _host_overhead(seconds: float) -> str:
    return f"{format_seconds(seconds)} a step for data and host" if seconds else ""


def _setting_source(name: str, given: Collection[str]) -> str:
    if name in given:
        return str(Source.USER)
    return "the model's sample" if name == "tokens_per_sample" else "default"


def _samples(count: float | None, what: str) -> str:
    return "" if count is None else f"{count:,.0f} samples {what}"


def _link_words(link: Link, where: str) -> str:
    if link.fits:
        rates = [fit.busbw_bytes_per_s for fit in link.fits.values()]
        low, high = format_bandwidth(min(rates)), format_bandwidth(max(rates))
        span = low if low == high else f"{low} to {high}"
        return f"links {where}: {link.name}, {span}"
    rate = format_bandwidth(link.bandwidth_bytes_per_s.value)
    return f"links {where}: {link.name}, {rate}"


def _link_source(link: Link) -> str:
    if link.fits:
        worst = max(fit.relative_residual for fit in link.fits.values())
        return _source(Source.MEASURED, worst)
    return _sources(link.bandwidth_bytes_per_s)


def _constant(learned: Learned, constant: Constant, first: Quantity, *others: Quantity) -> str:
    """Source of a constant; measured runs of it cover all quantities that it is made of."""
    runs = learned.runs.get(constant, 0)
    return _sources(first) + _runs(runs) if runs else _sources(first, *others)


def _runs(count: int) -> str:
    return f" ({count} run{'s' if count > 1 else ''})" if count else ""


def _sources(first: Quantity, *others: Quantity) -> str:
    """Source of a combined value: the least trusted source and the widest error."""
    numbers = (first, *others)
    order = list(Source)
    worst = max((number.source for number in numbers), key=order.index)
    return _source(worst, max(number.relative_error for number in numbers))


def _source(source: Source, error: float) -> str:
    return f"{source} +-{format_percent(error)}" if error else str(source)


def hints(decision: Decision) -> Iterator[str]:
    """Yield advice that improves the report, or caveats about the training."""
    facts, estimate = decision.facts, decision.estimate
    yield from decision.offers
    if not is_of_engines(facts.stack):
        yield (
            f"`{facts.stack.name}` is priced only: our engines do not run it, and"
            " `auto_parallelize` takes this plan without it"
        )
    yield from decision.suggestions
    yield from _path(decision)
    yield from too_large_to_load(decision)
    yield from allocator_hint(decision)
    yield from offload.hint(decision.plan)
    yield from levers.hint(decision)
    if set(facts.cluster.sources.values()) - {Source.MEASURED, Source.USER}:
        yield (
            "`advise probe --bench` on the nodes replaces rates of data sheets by measured ones"
            f" and narrows {format_seconds(estimate.step_low_s)} to"
            f" {format_seconds(estimate.step_high_s)}"
        )
    yield from _crowded(facts.cluster)
    yield from small_batch_hints(decision)
    norms = facts.model.batch_norms
    if norms and decision.plan.forwards > 1:
        yield (
            f"`{norms[0]}` is a batch norm: its statistics are of microbatches of"
            f" {decision.plan.microbatch_size}, not of the batch; `accumulation=1` keeps them whole"
        )


def _path(decision: Decision) -> Iterator[str]:
    """Say which code acts on values, and what that costs."""
    model, plan = decision.facts.model, decision.plan
    if not model.path_varies:
        return
    reads = [str(read) for read in model.reads[:MOST_READS]]
    more = f" and {len(model.reads) - MOST_READS} more" if len(model.reads) > MOST_READS else ""
    where = f": {', '.join(reads)}{more}" if reads else ""
    said = f"the model acts on values of tensors{where}; figures are of the sample's path"
    if model.source is CaptureSource.PARAMETERS:
        said = f"the model could not be followed{where}; activations and times are guesses"
    if plan.data_parallel.is_sharded and model.may_skip_units:
        said += "; ranks may call different units, so that all parameters are gathered at once"
    yield said


def too_large_to_load(decision: Decision) -> Iterator[str]:
    """Hint at a model that does not fit main memory while loading; plans do not include loading."""
    facts, estimate = decision.facts, decision.estimate
    memory, ranks = facts.cluster.host_memory_bytes, facts.cluster.devices_per_node
    how = loading(decision.plan, estimate, facts, decision.policy)
    if memory is None or how is Loadable.WHOLE:
        return
    usable = decision.policy.usable_host_bytes(memory.value)
    whole = load_bytes_per_node(estimate, facts.cluster)
    needed = deferred_bytes_per_node(decision.plan, facts)
    if how is Loadable.DEFERRED:
        yield (
            f"{ranks} ranks have no room to build the whole model each, {format_gib(whole)} of"
            f" {format_gib(usable)} usable main memory a node: `auto_parallelize(lambda: Model())`"
            " or `with advisor.deferred():` builds it without values, and a rank makes its own"
            f" shards alone, {format_gib(needed)} a node"
        )
        return
    fitting = int(usable // (needed / ranks))
    fewer = f"start {fitting} rank{'s' if fitting > 1 else ''} a node, or " if fitting else ""
    enough = format_gib(needed / (1 - decision.policy.host_headroom_fraction))
    yield (
        f"loading does not fit, built deferred too: {ranks} ranks make {format_gib(needed)} of"
        f" {format_gib(usable)} usable main memory a node; {fewer}take nodes with {enough}"
    )


def _crowded(cluster: ClusterProfile) -> Iterator[str]:
    """Warn of more CPU ranks than cores, if no bench has seen them take turns."""
    ranks, cores = cluster.devices_per_node, cluster.cores
    is_timed = cluster.shared_cores is not None
    if cluster.device.kind == "cpu" and cores is not None and ranks > cores and not is_timed:
        yield (
            f"{ranks} ranks take turns on {cores} cores: each waits for the others' turns, which no"
            f" estimate here counts, so a step may take longer than its range; measure it with"
            f" `advise probe --bench`, or start at most {cores} rank{'s' if cores > 1 else ''}"
        )
