"""Comparison of plans: their titles, and the verdict on one against another, in words."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from advisor.cost import Estimate
from advisor.decide.tree import TreeTrace, in_leaf
from advisor.inputs.policy import Objective, Policy
from advisor.search.ranking import Candidate, preferred, simplicity, tie_limit_s
from engines.plan import (
    Aggregation,
    Compression,
    DataParallel,
    Offload,
    OffloadTo,
    Plan,
    Recompute,
    Schedule,
    Updates,
)
from profiles.units import format_gib, format_percent, format_seconds


class PlanVerdict(StrEnum):
    """Verdict on another plan, compared with the one taken."""

    CHOSEN = "chosen"
    NOT_LEGAL = "not legal"
    NO_FIT = "does not fit"
    SLOWER = "slower"
    LARGER = "more memory"
    TIE = "tie"
    OUTSIDE = "outside the tree's families"
    RULED_OUT = "ruled out by the settings that were given"


def title(plan: Plan) -> str:
    """Describe a plan's parallelism in words.

    >>> title(Plan.parse("dp_replicate=2 dp_shard=8"))
    'HSDP, shard 8 x replicate 2'
    >>> title(Plan.parse("pp=4 tp=8 dp_replicate=2 zero=1"))
    'PP over 4 + TP over 8 + ZeRO-1 over 2'
    >>> title(Plan.parse("dp_replicate=8 updates=local sync_every=4"))
    'local SGD over 8 every 4 steps'
    >>> title(Plan.parse("dp_replicate=8 updates=local"))
    'local SGD over 8 every step'
    >>> title(Plan.parse("dp_replicate=6 servers=1 backup_workers=1"))
    'servers over 6 + 1 workers, 1 serving'
    """
    words = [f"{axis.upper()} over {getattr(plan, axis)}" for axis in _cut_axes(plan)]
    if not words or plan.data_parallel is not DataParallel.NONE:
        words.append(_replicas(plan))
    sent = [] if plan.aggregation is Aggregation.BACKEND else [f"{plan.aggregation} sums"]
    sent += [_SENT[plan.compression]] if plan.compression is not Compression.NONE else []
    offload = [offloaded(plan)] if plan.offload is not Offload.NONE else []
    return ", ".join([" + ".join(words), *sent, *offload])


def offloaded(plan: Plan) -> str:
    """Describe the offload; that of all states has the usual name, CPU or disk offload."""
    in_files = plan.offload_to is OffloadTo.DISK
    if plan.offload is Offload.STATES:
        return "disk offload" if in_files else "CPU offload"
    named = plan.offload.value.replace(",", " and ")
    return f"offloaded {named}{' to disk' if in_files else ''}"


_SENT = {Compression.BF16: "bf16 gradients", Compression.POWERSGD: "PowerSGD"}


def _replicas(plan: Plan) -> str:
    """Describe the data-parallel ranks in words."""
    replicate, shard = plan.dp_replicate, plan.dp_shard
    words = {
        DataParallel.NONE: "one device",
        DataParallel.THREADS: "threads",
        DataParallel.REPLICATE: "DDP",
        DataParallel.ZERO1: "ZeRO-1",
        DataParallel.ZERO2: "ZeRO-2",
        DataParallel.FULL_SHARD: "FSDP",
        DataParallel.HYBRID_SHARD: f"HSDP, shard {shard} x replicate {replicate}",
    }[plan.data_parallel]
    if not plan.updates_in_step:
        words = _UPDATES[plan.updates]
    if plan.data_degree > 1 and plan.data_parallel is not DataParallel.HYBRID_SHARD:
        words += f" over {plan.data_degree}"
    return words + _extra_ranks(plan)


_UPDATES = {
    Updates.SYNCHRONOUS: "servers",
    Updates.ASYNCHRONOUS: "asynchronous servers",
    Updates.LOCAL: "local SGD",
    Updates.DILOCO: "DiLoCo",
}


def _extra_ranks(plan: Plan) -> str:
    """Describe the period of updates, backup workers and servers."""
    every = "step" if plan.sync_every == 1 else f"{plan.sync_every} steps"
    words = [f" every {every}"] * plan.updates.is_periodic
    words += [f" + {plan.backup_workers} workers"] * bool(plan.backup_workers)
    words += [f", {plan.servers} serving"] * bool(plan.servers)
    return "".join(words)


def cuts(plan: Plan) -> str:
    """Describe in words how a replica's batch is split and run.

    >>> cuts(Plan.parse("pp=2 microbatch_size=1 microbatches=8 schedule=1f1b stages=b"))
    'microbatch 1 x 8 in 1F1B, fp32'
    """
    return f"microbatch {plan.microbatch_size}{_rounds(plan)}{_recomputed(plan)}, {plan.precision}"


def short_cuts(plan: Plan) -> str:
    """Describe the same more briefly, without the precision, which all plans share.

    >>> short_cuts(Plan.parse("microbatch_size=1 accumulation=8 recompute=full"))
    'mb 1 x 8, full recompute'
    """
    times = f" x {plan.forwards}" if plan.forwards > 1 else ""
    schedule = f", {_SCHEDULES[plan.schedule]}" if plan.schedule else ""
    return f"mb {plan.microbatch_size}{times}{schedule}{_recomputed(plan)}"


_SCHEDULES = {
    Schedule.NAIVE: "stages in turn",
    Schedule.GPIPE: "GPipe",
    Schedule.ONE_F_ONE_B: "1F1B",
    Schedule.INTERLEAVED: "interleaved 1F1B",
    Schedule.ZERO_BUBBLE: "zero bubble",
    Schedule.ZBV: "ZB-V",
}


def _rounds(plan: Plan) -> str:
    """Describe the number of forwards in a step, and the pipeline schedule."""
    if plan.schedule is None:
        return f" x {plan.forwards} accumulation" if plan.forwards > 1 else ""
    words = f" x {plan.microbatches} in {_SCHEDULES[plan.schedule]}"
    each = (len(plan.stages) + 1) // plan.pp
    if each > 1:
        words += f" with {each} stages a device"
    return words + (f" x {plan.accumulation} accumulation" if plan.accumulation > 1 else "")


def _recomputed(plan: Plan) -> str:
    words = [f", {recomputed_blocks(plan)}"] * (plan.recompute is not Recompute.NONE)
    return "".join([*words, *[f", loss in {plan.loss_chunks} chunks"] * (plan.loss_chunks > 1)])


def recomputed_blocks(plan: Plan) -> str:
    """Describe the recompute of `plan`: "full recompute of 3 blocks a stage".

    >>> recomputed_blocks(Plan.parse("recompute=selective"))
    'selective recompute'
    """
    words, count = f"{plan.recompute} recompute", plan.recompute_blocks
    if count is None:
        return words
    stage = " a stage" if plan.pp > 1 else ""
    return f"{words} of {count} block{'s' * (count > 1)}{stage}"


def _cut_axes(plan: Plan) -> tuple[str, ...]:
    """Return the axes that split the model or its sequence."""
    return tuple(axis for axis in ("pp", "cp", "tp", "ep") if getattr(plan, axis) > 1)


Kind = tuple[tuple[str, ...], DataParallel, Offload, OffloadTo, Updates, bool]


def kind(plan: Plan) -> Kind:
    """Return the plan's axes, sharding, offload and kind of updates, without degrees."""
    shards = plan.data_parallel, plan.offload, plan.offload_to
    return _cut_axes(plan), *shards, plan.updates, plan.servers > 0


def is_hybrid(plan: Plan) -> bool:
    """True for plans with both PP and TP."""
    return plan.pp > 1 and plan.tp > 1


def kind_words(plan: Plan) -> str:
    """Describe `kind` in words.

    >>> kind_words(Plan.parse("pp=4 tp=8 dp_replicate=2 zero=1"))
    'PP + TP + ZeRO-1'
    """
    words = [axis.upper() for axis in _cut_axes(plan)]
    if not words or plan.data_parallel is not DataParallel.NONE:
        words.append(_replicas(plan).partition(",")[0].partition(" over")[0])
    offload = [offloaded(plan)] if plan.offload is not Offload.NONE else []
    return ", ".join([" + ".join(words), *offload])


Shape = tuple[Kind, tuple[int, ...], str]


def shape(plan: Plan) -> Shape:
    """Return the kind and degrees: plans of one shape differ only in how the batch is split and
    run."""
    degrees = (plan.pp, plan.cp, plan.tp, plan.ep, plan.dp_replicate, plan.dp_shard)
    return kind(plan), degrees, _extra_ranks(plan)


def best_of(candidates: list[Candidate], policy: Policy) -> Candidate:
    """Return the preferred plan that fits; if none does, the nearest miss."""
    fitting = [candidate for candidate in candidates if candidate.fits]
    return preferred(fitting, policy) if fitting else nearest_miss(candidates)


def nearest_miss(candidates: Sequence[Candidate]) -> Candidate:
    """Return the plan that exceeds the limits by least."""
    return min(
        candidates,
        key=lambda c: (
            c.finding.missing_bytes if c.finding else 0.0,
            simplicity(c.plan),
            str(c.plan),
        ),
    )


def compare(
    other: Candidate,
    chosen: Candidate,
    policy: Policy,
    trace: TreeTrace,
    *,
    fastest_s: float,
    was_open: bool = True,
) -> tuple[PlanVerdict, str]:
    """Return the verdict on `other` against the chosen plan, and the reason with numbers.

    Args:
        fastest_s: step time of the fastest plan considered; plans within the policy's margin of it
            tie.
        was_open: the fixed settings allowed `other`.
    """
    if other.plan == chosen.plan:
        return PlanVerdict.CHOSEN, "it is the chosen plan"
    if other.finding is not None:
        return PlanVerdict.NO_FIT, other.finding.because
    mine, theirs = chosen.estimate, other.estimate
    if policy.objective is Objective.MEMORY:
        more = theirs.peak_high_bytes - mine.peak_high_bytes
        if more < 0:
            return (
                PlanVerdict.RULED_OUT,
                f"needs {format_gib(-more)} less, but other settings are fixed",
            )
        return PlanVerdict.LARGER, f"needs {format_gib(more)} more"
    difference = theirs.step_s - mine.step_s
    by = signed_percent(difference / mine.step_s)
    follows = policy.objective is Objective.TREE and in_leaf(chosen.plan, trace)
    if theirs.step_s <= tie_limit_s(fastest_s, policy):
        if follows and not in_leaf(other.plan, trace):
            words = f"{by}, but" if difference <= 0 else f"tie: {by};"
            return PlanVerdict.OUTSIDE, f"{words} outside the tree's leaf"
        if not was_open and theirs.step_s < fastest_s:
            return PlanVerdict.RULED_OUT, f"{by}, but other settings are fixed"
        simpler = simplicity(other.plan) < simplicity(chosen.plan)
        ending = "" if simpler or policy.objective is not Objective.TREE else "; not simpler"
        return PlanVerdict.TIE, f"tie: {by}{ending}"
    because = f"{by}, {format_seconds(difference)}: {causes(theirs, mine)}"
    if difference <= tie_limit_s(mine.step_s, policy) - mine.step_s:
        because += f"; {signed_percent(theirs.step_s / fastest_s - 1)} against the fastest plan"
    return PlanVerdict.SLOWER, because


_AS_MULTIPLE = 2.0


def signed_percent(fraction: float) -> str:
    """Format a fraction as a percentage with its sign, also if it rounds to zero; as a multiple
    from three times as much on.

    >>> signed_percent(-0.014), signed_percent(17.6)
    ('-1.4%', '18.6x')
    """
    if fraction >= _AS_MULTIPLE:
        return f"{1 + fraction:.1f}x"
    return ("-" if fraction < 0 else "+") + format_percent(abs(fraction))


_PARTS = {
    "compute_s": "computing",
    "recompute_s": "recompute",
    "optimizer_s": "optimizer",
    "exposed_s": "exposed communication",
    "host_s": "transfers to the host",
    "launch_s": "launching",
    "idle_s": "waiting for other stages",
    "straggling_s": "waiting for the slowest rank",
    "host_overhead_s": "data loading and host",
}
# Parts are named until less than this share of the difference is left, about what rounding hides.
_UNNAMED = 0.05
# Below a nanosecond a part is shown as zero.
_SHOWN_S = 1e-9


def causes(slower: Estimate, faster: Estimate) -> str:
    """List the parts of the step in which `slower` loses or gains, largest first.

    Unnamed parts make up less than 5 % of the difference, so that the numbers add up.
    """
    differences = {
        name: getattr(slower.time, part) - getattr(faster.time, part)
        for part, name in _PARTS.items()
    }
    rest = difference = slower.step_s - faster.step_s
    named = []
    for name in sorted(differences, key=lambda name: (-abs(differences[name]), name)):
        change = differences[name]
        if abs(rest) <= _UNNAMED * abs(difference) or abs(change) < _SHOWN_S:
            break
        named.append(f"{format_seconds(abs(change))} {'more' if change > 0 else 'less'} {name}")
        rest -= change
    return ", ".join(named)
