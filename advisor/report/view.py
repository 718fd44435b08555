"""ReportView: the words and numbers of a report, made once; renderers only lay them out."""

from __future__ import annotations

from collections.abc import Iterator

from advisor.cost import Estimate
from advisor.cost.communication import COMMUNICATION_ERROR, HOST_LINK_BYTES_PER_S
from advisor.cost.compute import COMPUTE_ERROR, HOST_BANDWIDTH_BYTES_PER_S, matmul_fraction
from advisor.cost.memory import ACTIVATION_ERROR
from advisor.decision import Alternative, Decision, cuts, title
from engines.plan import Offload, Plan
from profiles.cluster import ClusterProfile, Link
from profiles.provenance import Source
from profiles.record import Record
from profiles.units import (
    format_bandwidth,
    format_count,
    format_flop_rate,
    format_gib,
    format_percent,
    format_seconds,
)


class Part(Record):
    """One piece of a sum: its name, its value in words, and its share of the whole."""

    name: str
    value: str
    share: float


class Row(Record):
    """Another plan in the table."""

    title: str
    step: str
    memory: str
    why: str


class Basis(Record):
    """Something that the report rests on, and where it is from."""

    what: str
    source: str


class ReportView(Record):
    """Everything that a report says, in the order in which it says it."""

    title: str
    verdict: str
    plan: tuple[str, ...]
    devices: str
    step: str
    rate: str
    memory: str
    memory_share: float
    reasons: tuple[str, ...]
    dissent: str | None
    memory_title: str
    memory_parts: tuple[Part, ...]
    time_title: str
    time_parts: tuple[Part, ...]
    others: tuple[Row, ...]
    not_built: str | None
    weighed: str
    basis: tuple[Basis, ...]
    hints: tuple[str, ...]
    next_command: str
    trace: tuple[str, ...]


def view_of(decision: Decision) -> ReportView:
    """All words and numbers of the report of `decision`."""
    plan, estimate, facts = decision.plan, decision.estimate, decision.facts
    usable = decision.policy.usable_bytes(facts.cluster.device)
    degrees = [word for word in str(plan).split() if word.split("=")[0] in _DEGREES]
    built = decision.trace.not_built
    view = ReportView(
        title=f"{title(plan)} for {facts.model.name}",
        verdict="it fits",
        plan=(" ".join(degrees) or str(plan), cuts(plan)),
        devices=f"{plan.world_size} of {facts.cluster.world_size}"
        f" device{'s' if facts.cluster.world_size > 1 else ''}",
        step=f"{format_seconds(estimate.step_s)}"
        f"  ({format_seconds(estimate.step_low_s)} to {format_seconds(estimate.step_high_s)})",
        rate=_rate(estimate),
        memory=f"{format_gib(estimate.peak_bytes)}"
        f"  ({format_gib(estimate.peak_low_bytes, unit=False)} to"
        f" {format_gib(estimate.peak_high_bytes, unit=False)})"
        f" of {format_gib(usable, unit=False)} usable",
        memory_share=estimate.peak_bytes / usable,
        reasons=decision.reasons,
        dissent=decision.dissent,
        memory_title=f"memory per device, GiB at its peak ({estimate.phase})",
        memory_parts=tuple(_memory_parts(estimate)),
        time_title="time per step",
        time_parts=tuple(_time_parts(estimate)),
        others=tuple(_row(other) for other in decision.alternatives),
        not_built=f"not built yet: {', '.join(built)}" if built else None,
        weighed=_weighed(decision),
        basis=tuple(_basis(decision)),
        hints=tuple(_hints(decision)),
        next_command=_command(plan, facts.cluster),
        trace=tuple(str(decision.trace).splitlines()),
    )
    return ReportView.model_validate(_printable(view.model_dump()))


_DEGREES = frozenset({"pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "zero", "data_parallel"})


def _rate(estimate: Estimate) -> str:
    rate, name = estimate.tokens_per_s, "tokens/s"
    if rate is None:
        rate, name = estimate.samples_per_s, "samples/s"
    count = format_count(rate) if rate >= 1000 else f"{rate:.1f}"
    return f"{count} {name}    MFU {format_percent(estimate.mfu)}"


def _memory_parts(estimate: Estimate) -> Iterator[Part]:
    names = {
        "parameters": "parameters",
        "gradients": "gradients",
        "optimizer": "optimizer",
        "activations": "activations",
        "gathered": "gathered and buffers",
        "transient": "unit in work",
        "batch": "batch",
        "context": "context",
    }
    for field, name in names.items():
        value = getattr(estimate.memory, field)
        shown = format_gib(value, unit=False)
        if float(shown):
            yield Part(name=name, value=shown, share=value / estimate.memory.total)


def _time_parts(estimate: Estimate) -> Iterator[Part]:
    names = {
        "compute_s": "compute",
        "recompute_s": "recompute",
        "optimizer_s": "optimizer",
        "exposed_s": "exposed communication",
        "launch_s": "launching",
    }
    for field, name in names.items():
        value = getattr(estimate.time, field)
        if value:
            yield Part(name=name, value=format_seconds(value), share=value / estimate.step_s)
    if estimate.time.overlapped_s:
        value = estimate.time.overlapped_s
        yield Part(name="(hidden communication", value=f"{format_seconds(value)})", share=0.0)


def _row(other: Alternative) -> Row:
    return Row(
        title=other.title,
        step=format_seconds(other.step_s) if other.step_s is not None else "-",
        memory=format_gib(other.peak_bytes),
        why=other.because,
    )


def _weighed(decision: Decision) -> str:
    left_out = sum(decision.rejected.values())
    words = f"{decision.weighed} plans weighed"
    if not left_out:
        return f"{words}, all fit"
    rules = ", ".join(f"{count} by `{rule}`" for rule, count in decision.rejected.items())
    return f"{words}, {left_out} left out: {rules}"


def _basis(decision: Decision) -> Iterator[Basis]:
    facts, estimate = decision.facts, decision.estimate
    cluster, device = facts.cluster, facts.cluster.device
    plan = decision.plan
    dtype = plan.precision.dtype
    peak = device.flop_per_s.get(dtype) or device.flop_per_s["float32"]
    yield Basis(
        what=f"matrix products: {format_percent(matmul_fraction(device))} of"
        f" {format_flop_rate(peak.value)} on {device.name}",
        source=_source(
            device.matmul_fraction.source,
            max(device.matmul_fraction.relative_error, peak.relative_error),
        ),
    )
    bandwidth = device.memory_bandwidth_bytes_per_s
    yield Basis(
        what=f"device memory: {format_bandwidth(bandwidth.value)}",
        source=_source(bandwidth.source, bandwidth.relative_error),
    )
    for where, link in (("in the node", cluster.intra), ("between nodes", cluster.inter)):
        if link is not None:
            yield Basis(what=_link_words(link, where), source=_link_source(link))
    yield Basis(
        what="activations: counted from the model, operation by operation",
        source=_source(Source.DERIVED, ACTIVATION_ERROR),
    )
    yield Basis(
        what="model of computing: roofline of unfused operations",
        source=_source(Source.ASSUMED, COMPUTE_ERROR),
    )
    if estimate.traffic:
        yield Basis(
            what="model of communication: latency and bandwidth, one unit prefetched",
            source=_source(Source.ASSUMED, COMMUNICATION_ERROR),
        )
    if plan.offload is Offload.STATES:
        yield Basis(
            what=f"way to the host {format_bandwidth(HOST_LINK_BYTES_PER_S)} a device, update at"
            f" {format_bandwidth(HOST_BANDWIDTH_BYTES_PER_S)} a node",
            source=str(Source.ASSUMED),
        )
    tokens = facts.tokens_per_sample
    size = f"batch {facts.workload.global_batch_size}" + (f" x {tokens} tokens" if tokens else "")
    yield Basis(
        what=f"{size}, {facts.workload.optimizer.name}, {plan.precision}",
        source=str(Source.USER),
    )
    kept = " ".join(
        f"{key}={value}"
        for key, value in decision.pins.items()
        if key not in Plan.model_fields or value != Plan.model_fields[key].default
    )
    if kept:
        yield Basis(what=f"kept as given: {kept}", source=str(Source.USER))


def _link_words(link: Link, where: str) -> str:
    if link.fits:
        rates = [fit.busbw_bytes_per_s for fit in link.fits.values()]
        low, high = format_bandwidth(min(rates)), format_bandwidth(max(rates))
        return f"links {where}: {link.name}, {low if low == high else f'{low} to {high}'}"
    return f"links {where}: {link.name}, {format_bandwidth(link.bandwidth_bytes_per_s.value)}"


def _link_source(link: Link) -> str:
    if link.fits:
        worst = max(fit.relative_residual for fit in link.fits.values())
        return _source(Source.MEASURED, worst)
    return _source(link.bandwidth_bytes_per_s.source, link.bandwidth_bytes_per_s.relative_error)


def _source(source: Source, error: float) -> str:
    return f"{source} +-{format_percent(error)}" if error else str(source)


def _hints(decision: Decision) -> Iterator[str]:
    sources = set(decision.facts.cluster.sources.values())
    estimate = decision.estimate
    if sources - {Source.MEASURED, Source.USER}:
        yield (
            "`advise probe --bench` on the nodes replaces rates of data sheets by measured ones"
            f" and narrows {format_seconds(estimate.step_low_s)} to"
            f" {format_seconds(estimate.step_high_s)}"
        )
    norms = decision.facts.model.batch_norms
    if norms and decision.plan.forwards > 1:
        yield (
            f"`{norms[0]}` is a batch norm: its statistics are of microbatches of"
            f" {decision.plan.microbatch_size}, not of the batch; `accumulation=1` keeps them whole"
        )


def _command(plan: Plan, cluster: ClusterProfile) -> str:
    if plan.world_size == 1:
        return "python train.py"
    nodes = f"--nnodes {cluster.num_nodes} " if cluster.num_nodes > 1 else ""
    return f"torchrun {nodes}--nproc-per-node {cluster.devices_per_node} train.py"


def _printable(value: object) -> object:
    """Module names are the user's: no control character of theirs reaches a terminal."""
    match value:
        case str():
            return "".join(letter if letter.isprintable() else "?" for letter in value)
        case dict():
            return {key: _printable(item) for key, item in value.items()}
        case list() | tuple():
            return [_printable(item) for item in value]
    return value
