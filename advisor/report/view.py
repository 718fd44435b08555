"""ReportView: text and numbers of a report, formatted once for all renderers."""

from __future__ import annotations

from collections.abc import Iterator

from advisor.cost import Estimate
from advisor.decide.comparison import cuts, short_cuts, title
from advisor.decide.decision import Alternative, Decision
from advisor.decide.large_batch import batch_advice
from advisor.inputs.policy import Objective
from advisor.report.basis import Basis, basis, hints
from advisor.search.ranking import (
    SIMPLER_FIRST,
    Loadable,
    deferred_bytes_per_node,
    host_bytes_per_node,
    load_bytes_per_node,
    loading,
)
from engines.plan import Plan
from profiles.machine.cluster import ClusterProfile
from profiles.record import Record
from profiles.units import format_count, format_gib, format_percent, format_seconds


class BreakdownItem(Record):
    """An entry of a breakdown: name, formatted value, and share of the total."""

    name: str
    value: str
    share: float


class AlternativeRow(Record):
    """A table row of an alternative plan."""

    title: str
    cut: str
    step: str
    memory: str
    why: str


class ReportView(Record):
    """Content of a report, in output order."""

    title: str
    verdict: str
    plan: tuple[str, ...]
    devices: str
    step: str
    rate: str
    memory: str
    memory_share: float
    main_memory: tuple[str, ...]
    batch: tuple[str, ...]
    reasons: tuple[str, ...]
    dissent: str | None
    memory_title: str
    memory_parts: tuple[BreakdownItem, ...]
    memory_note: str | None
    time_title: str
    time_parts: tuple[BreakdownItem, ...]
    others: tuple[AlternativeRow, ...]
    ties: str | None
    not_weighed: str | None
    weighed: str
    basis: tuple[Basis, ...]
    notes: tuple[str, ...]
    hints: tuple[str, ...]
    next_command: str
    trace: tuple[str, ...]


def view_of(decision: Decision) -> ReportView:
    """Format all text and numbers of the report of `decision`."""
    plan, estimate, facts = decision.plan, decision.estimate, decision.facts
    usable = decision.policy.usable_bytes(facts.cluster.device)
    degrees, settings = (
        " ".join(word for word in str(plan).split() if is_shown(word.split("=")[0]))
        for is_shown in (_is_degree, _is_setting)
    )
    built = decision.trace.not_weighed
    advice = batch_advice(facts)
    loads = loading(plan, estimate, facts, decision.policy)
    too_large = ", too large to load" if loads is Loadable.TOO_LARGE else ""
    view = ReportView(
        title=f"{title(plan)} for {facts.model.name}{too_large}",
        verdict=loads.value,
        plan=(degrees or str(plan), *((settings,) if degrees and settings else ()), cuts(plan)),
        devices=f"{plan.world_size} of {facts.cluster.world_size}"
        f" device{'s' if facts.cluster.world_size > 1 else ''}",
        step=f"{format_seconds(estimate.step_s)}"
        f"  ({format_seconds(estimate.step_low_s)} to {format_seconds(estimate.step_high_s)})",
        rate=_rate(estimate),
        memory=f"{format_gib(estimate.peak_bytes, unit=False)} GiB"
        f"  ({format_gib(estimate.peak_low_bytes, unit=False)} to"
        f" {format_gib(estimate.peak_high_bytes, unit=False)})"
        f" of {format_gib(usable, unit=False)} usable",
        memory_share=estimate.peak_bytes / usable,
        main_memory=tuple(_main_memory(decision)),
        batch=tuple(advice.lines()),
        reasons=decision.reasons,
        dissent=decision.dissent,
        memory_title=f"memory per device at its peak ({estimate.phase})",
        memory_parts=tuple(_memory_parts(estimate)),
        memory_note=_loss_note(decision),
        time_title="time per step",
        time_parts=tuple(_time_parts(estimate)),
        others=tuple(_row(other) for other in decision.alternatives),
        ties=_ties(decision),
        not_weighed=f"not weighed yet: {', '.join(built)}" if built else None,
        weighed=_weighed(decision),
        basis=tuple(basis(decision)),
        notes=(*facts.cluster.notes, *advice.warnings),
        hints=tuple(hints(decision)),
        next_command=_command(plan, facts.cluster),
        trace=tuple(str(decision.trace).splitlines()),
    )
    return ReportView.model_validate(_printable(view.model_dump()))


# Entries below this share of a breakdown are omitted; so is an MFU below it.
_SHOWN = 0.0005
# Loss memory is reported from this share of the peak on.
_MATTERS = 0.1
_DEGREES = frozenset({"pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "zero", "data_parallel"})
# Settings that `cuts` says in words, and those that are too long for a line: `plan.json` has them.
_IN_WORDS = frozenset(
    {
        "microbatch_size",
        "microbatches",
        "accumulation",
        "schedule",
        "recompute",
        "recompute_blocks",
        "precision",
    }
)
_LONG = frozenset({"stages", "tensor_styles"})


def _is_degree(name: str) -> bool:
    return name in _DEGREES


def _is_setting(name: str) -> bool:
    """True for settings shown beside the degrees: all that nothing else shows."""
    return name not in _DEGREES | _IN_WORDS | _LONG


def _rate(estimate: Estimate) -> str:
    rate, name = estimate.tokens_per_s, "tokens/s"
    if rate is None:
        rate, name = estimate.samples_per_s, "samples/s"
    count = format_count(rate) if rate >= 1000 else f"{rate:.1f}"
    used = format_percent(estimate.mfu) if estimate.mfu >= _SHOWN else "below 0.1%"
    return f"{count} {name}    MFU {used}"


def _memory_parts(estimate: Estimate) -> Iterator[BreakdownItem]:
    names = {
        "parameters": "parameters",
        "gradients": "gradients",
        "optimizer": "optimizer",
        "activations": "activations",
        "gathered": "gathered and buffers",
        "transient": "unit in work",
        "batch": "batch",
        "transfers": "received by stages",
        "workspaces": "workspaces",
        "context": "context",
    }
    for field, name in names.items():
        value = getattr(estimate.memory, field)
        if value >= _SHOWN * (estimate.memory.total - estimate.memory.context):
            share = value / estimate.memory.total
            yield BreakdownItem(name=name, value=format_gib(value), share=share)


def _time_parts(estimate: Estimate) -> Iterator[BreakdownItem]:
    names = {
        "compute_s": "compute",
        "recompute_s": "recompute",
        "optimizer_s": "optimizer",
        "exposed_s": "exposed communication",
        "host_s": f"transfers to the host{' and disk' if estimate.disk_bytes else ''}",
        "launch_s": "launching",
        "idle_s": "waiting for other stages",
        "straggling_s": "waiting for the slowest rank",
        "host_overhead_s": "data loading and host",
    }
    for field, name in names.items():
        value = getattr(estimate.time, field)
        share = value / estimate.step_s
        if share >= _SHOWN:
            yield BreakdownItem(name=name, value=format_seconds(value), share=share)
    hidden = estimate.time.overlapped_s
    if hidden >= _SHOWN * estimate.step_s:
        sent = ["communication"] * bool(estimate.traffic)
        sent += ["transfers"] * bool(estimate.host_traffic_bytes)
        name = f"(hidden {' and '.join(sent)}"
        yield BreakdownItem(name=name, value=f"{format_seconds(hidden)})", share=0.0)


def _loss_note(decision: Decision) -> str | None:
    """Note on the loss's share of the peak, if it is large enough."""
    estimate = decision.estimate
    if estimate.loss_bytes < _MATTERS * estimate.memory.total:
        return None
    parts = "what it keeps for the backward, and the gradient of its input"
    if decision.facts.tokens_per_sample:
        parts = "copies of the logits in fp32 (log-softmax, gradient)"
    return f"of it the loss holds {format_gib(estimate.loss_bytes)}: {parts}"


def _main_memory(decision: Decision) -> Iterator[str]:
    """Yield main memory to load the model, main memory of offloaded states, and disk space."""
    estimate, cluster = decision.estimate, decision.facts.cluster
    memory = cluster.host_memory_bytes
    of = ""
    if memory is not None:
        of = f" of {format_gib(decision.policy.usable_host_bytes(memory.value))} usable"
    ranks = cluster.devices_per_node
    copies = f"{ranks} copies" if ranks > 1 else "one copy"
    needed = format_gib(load_bytes_per_node(estimate, cluster))
    yield f"main memory a node to load {copies}: {needed}{of}"
    if loading(decision.plan, estimate, decision.facts, decision.policy) is not Loadable.WHOLE:
        needed = format_gib(deferred_bytes_per_node(decision.plan, decision.facts))
        yield f"built under `advisor.deferred()`: {needed}{of}"
    if estimate.host_bytes and memory is not None:
        needed = format_gib(host_bytes_per_node(estimate, cluster))
        yield f"main memory per node: {needed}{of}"
    if estimate.disk_bytes:
        yield f"on disk a rank: {format_gib(estimate.disk_bytes)}"


def _ties(decision: Decision) -> str | None:
    """Describe how ties are broken, if there are any."""
    if not any(other.because.startswith("tie:") for other in decision.alternatives):
        return None
    margin = format_percent(decision.policy.simplicity_margin)
    fastest = ""
    if decision.fastest_s is not None:
        fastest = f" ({format_seconds(decision.fastest_s)})"
    if decision.policy.objective is not Objective.TREE:
        return f"tie: within {margin} of the fastest plan{fastest}"
    words = f"tie: within {margin} of the fastest plan that the tree allows{fastest}"
    return f"{words}. The simpler plan is taken: {SIMPLER_FIRST}"


def _row(other: Alternative) -> AlternativeRow:
    return AlternativeRow(
        title=other.title,
        cut=short_cuts(other.plan),
        step=format_seconds(other.step_s) if other.step_s is not None else "-",
        memory=format_gib(other.peak_bytes),
        why=other.because,
    )


def _weighed(decision: Decision) -> str:
    left_out = sum(decision.rejected.values())
    words = f"{decision.weighed:,} plans weighed"
    exact = decision.weighed if decision.estimated is None else decision.estimated
    rules = ", ".join(f"{count:,} by `{rule}`" for rule, count in decision.rejected.items())
    if exact < decision.weighed:
        # Only plans with the best lower bounds are estimated exactly.
        words += f", {exact:,} of them in detail"
        return f"{words}; at least {left_out:,} left out: {rules}" if left_out else words
    if not left_out:
        return f"{words}, all fit"
    return f"{words}, {left_out:,} left out: {rules}"


def _command(plan: Plan, cluster: ClusterProfile) -> str:
    if plan.world_size == 1:
        return "python train.py"
    nodes = f"--nnodes {cluster.num_nodes} " if cluster.num_nodes > 1 else ""
    return f"torchrun {nodes}--nproc-per-node {cluster.devices_per_node} train.py"


def _printable(value: object) -> object:
    """Replace control characters: module names are user input and reach a terminal."""
    match value:
        case str():
            return "".join(letter if letter.isprintable() else "?" for letter in value)
        case dict():
            return {key: _printable(item) for key, item in value.items()}
        case list() | tuple():
            return [_printable(item) for item in value]
    return value
