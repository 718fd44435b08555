"""Rules that exclude plans, and the order of preference among the others.

Numbers come from the facts, the policy and the estimate; a rule only compares.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from advisor.cost import CostModel, Estimate
from advisor.cost.memory.buffers import shard_degree
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Objective, Policy
from advisor.search.space import KINDS, RECOMPUTES, SCHEDULES, Integers, Row, Space
from engines.plan import DataParallel, Offload, Plan, Updates
from profiles.allocator.host_memory import Loading, load_memory
from profiles.errors import AdvisorError
from profiles.machine.cluster import ClusterProfile
from profiles.record import Record
from profiles.units import format_gib

log = logging.getLogger(__name__)
FITS_HOST, NOT_ESTIMATED = "fits-host", "not-estimated"


class Finding(Record):
    """Reason to exclude a plan: the rule, a sentence with its numbers, and the missing bytes."""

    rule: str
    because: str
    missing_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """Plan with its estimate; `finding` is None if no rule excludes it."""

    plan: Plan
    estimate: Estimate
    finding: Finding | None = None

    @property
    def fits(self) -> bool:
        return self.finding is None


Rule = Callable[[Plan, Estimate, Facts, Policy], Finding | None]


def fits_device(plan: Plan, estimate: Estimate, facts: Facts, policy: Policy) -> Finding | None:
    """Exclude a plan if the upper end of its peak exceeds usable memory: OOM is the worst error."""
    usable = policy.usable_bytes(facts.cluster.device)
    if estimate.fits(usable):
        return None
    missing = estimate.peak_high_bytes - usable
    return Finding(
        rule="fits-device",
        because=f"does not fit: needs up to {format_gib(estimate.peak_high_bytes)} of"
        f" {format_gib(usable)} usable, {format_gib(missing)} too much",
        missing_bytes=missing,
    )


def fits_host(plan: Plan, estimate: Estimate, facts: Facts, policy: Policy) -> Finding | None:
    """Exclude a plan if offloaded states of a node's devices exceed its main memory."""
    if not estimate.host_bytes:
        return None
    needed = host_bytes_per_node(estimate, facts.cluster)
    memory = facts.cluster.host_memory_bytes
    if memory is None:
        return Finding(
            rule=FITS_HOST,
            because=f"needs {format_gib(needed)} of main memory per node, which is not known here",
            missing_bytes=needed,
        )
    usable = policy.usable_host_bytes(memory.value)
    if needed <= usable:
        return None
    return Finding(
        rule=FITS_HOST,
        because=f"does not fit: needs {format_gib(needed)} of {format_gib(usable)} usable main"
        " memory per node",
        missing_bytes=needed - usable,
    )


def fits_disk(plan: Plan, estimate: Estimate, facts: Facts, policy: Policy) -> Finding | None:
    """Exclude a plan if the files of a node's devices exceed the free space of its disk."""
    free = facts.cluster.disk_free_bytes
    if not estimate.disk_bytes or free is None:
        return None
    needed = estimate.disk_bytes * facts.cluster.devices_per_node
    if needed <= free.value:
        return None
    return Finding(
        rule="fits-disk",
        because=f"does not fit: needs {format_gib(needed)} of {format_gib(free.value)} that are"
        " free on a node's disk",
        missing_bytes=needed - free.value,
    )


def host_bytes_per_node(estimate: Estimate, cluster: ClusterProfile) -> float:
    """Bytes of main memory for the offloaded states of a node's devices."""
    return estimate.host_bytes * cluster.devices_per_node


def load_bytes_per_node(estimate: Estimate, cluster: ClusterProfile) -> float:
    """Bytes of main memory while a node's ranks load and each builds the whole model."""
    return estimate.load_bytes * cluster.devices_per_node


def deferred_bytes_per_node(plan: Plan, facts: Facts) -> float:
    """Bytes of main memory while a node's ranks load a model that was built deferred.

    Each makes its own shards alone, on its device or, where that is the CPU, in main memory. Stages
    and split layers count as equal parts.
    """
    cluster = facts.cluster
    way = Loading.SHARDS if cluster.device.kind == "cpu" else Loading.DEVICE
    shards = plan.pp * plan.tp * shard_degree(plan)
    memory = load_memory(facts.model, way, ranks_per_node=cluster.devices_per_node, shards=shards)
    return memory.per_node_bytes


class Loadable(StrEnum):
    """Possibility to load a model on this cluster."""

    WHOLE = "it fits"
    DEFERRED = "fits, built deferred"
    TOO_LARGE = "cannot be loaded"


def loading(plan: Plan, estimate: Estimate, facts: Facts, policy: Policy) -> Loadable:
    """Compare a node's main memory with what its ranks build; it suffices if it is unknown.

    A model that is not built whole by every rank is built under `advisor.deferred()`.
    """
    memory = facts.cluster.host_memory_bytes
    needed = load_bytes_per_node(estimate, facts.cluster)
    usable = policy.usable_host_bytes(memory.value) if memory is not None else needed
    if needed <= usable:
        return Loadable.WHOLE
    fits = deferred_bytes_per_node(plan, facts) <= usable
    return Loadable.DEFERRED if fits else Loadable.TOO_LARGE


RULES: tuple[Rule, ...] = (fits_device, fits_host, fits_disk)


def judged(plan: Plan, costs: CostModel, policy: Policy) -> Candidate:
    """Estimate a plan, and find the first rule that excludes it."""
    estimate = costs.estimate(plan)
    findings = (rule(plan, estimate, costs.facts, policy) for rule in RULES)
    return Candidate(plan, estimate, next((one for one in findings if one is not None), None))


def weigh(plans: Iterable[Plan], costs: CostModel, policy: Policy) -> list[Candidate]:
    """Judge all plans; those that cannot be estimated are left out."""
    candidates = []
    for plan in plans:
        with skipped_on_error(plan):
            candidates.append(judged(plan, costs, policy))
    return candidates


@contextmanager
def skipped_on_error(plan: Plan | None) -> Iterator[None]:
    """Suppress internal errors while one plan is estimated: it is left out, others are not.

    They are logged unless `plan` is None, with a traceback if this logger shows debug messages
    (`advise --debug`). Errors in the input concern all plans and are raised.
    """
    try:
        yield
    except AdvisorError:
        raise
    except Exception as error:
        if plan is None:
            return
        is_shown = log.isEnabledFor(logging.DEBUG)
        what = f"{type(error).__name__}: {error}"
        log.warning("left out, as it could not be estimated: %s: %s", plan, what, exc_info=is_shown)


_KINDS = (
    DataParallel.NONE,
    DataParallel.THREADS,
    DataParallel.REPLICATE,
    DataParallel.ZERO1,
    DataParallel.ZERO2,
    DataParallel.FULL_SHARD,
    DataParallel.HYBRID_SHARD,
)
# `simplicity` in words.
SIMPLER_FIRST = (
    "states on the device, then the model in one piece before TP, PP and both, then smaller groups,"
    " then DDP before ZeRO-1, ZeRO-2, FSDP and HSDP, then the plainer schedule with fewer stages,"
    " then less recompute, then fewer microbatches"
)


def simplicity_columns(space: Space) -> list[Integers]:
    """Columns of `simplicity` for all rows, without offload and updates, equal in all of them."""
    kinds = np.array([_KINDS.index(kind) for kind in KINDS])
    return [
        (space.tp * space.cp * space.ep > 1) + 2 * (space.pp > 1),
        space.pp * space.tp * space.cp * space.ep,
        kinds[space.kind],
        space.schedule,
        space.pp * space.per_rank,
        space.recompute,
        space.forwards,
    ]


def simplicity(plan: Plan | Row) -> tuple[int, ...]:
    """Sort key in the order of `SIMPLER_FIRST`, simpler plans first.

    Simpler means fewer moving parts, and fewer ways to be slower than predicted. Without pp and tp
    the user's training loop runs unchanged. With tp it does too, but each kind of layer needs a
    proof of its split; stages need `train_step`, a schedule, and equal microbatches. A model is
    split no further than it needs to be, and replicated or sharded from there (Megatron-LM's second
    takeaway, arXiv:2104.04473). Asynchronous and periodic updates come last.
    """
    return (
        int(plan.offload is not Offload.NONE) + 2 * _asynchrony(plan),
        # 0 neither, 1 split layers or sequences, 2 stages, 3 both.
        int(max(plan.tp, plan.cp, plan.ep) > 1) + 2 * int(plan.pp > 1),
        plan.pp * plan.tp * plan.cp * plan.ep,
        _KINDS.index(plan.data_parallel),
        SCHEDULES.index(plan.schedule),
        len(plan.stages),
        RECOMPUTES.index(plan.recompute),
        plan.forwards,
    )


def _asynchrony(plan: Plan | Row) -> int:
    """Order of updates from synchronous to asynchronous: the same for all plans of a space."""
    order = (Updates.SYNCHRONOUS, Updates.LOCAL, Updates.DILOCO, Updates.ASYNCHRONOUS)
    return 2 * order.index(plan.updates) + (plan.servers > 0) + (plan.backup_workers > 0)


def tie_limit_s(fastest_s: float, policy: Policy) -> float:
    """Longest step that ties with `fastest_s`, the step of the fastest of the compared plans.

    With one limit for all of them, plans within it tie with each other too; with margins between
    pairs they need not.
    """
    return fastest_s * (1 + policy.simplicity_margin)


def beats(one: Candidate, other: Candidate, policy: Policy) -> bool:
    """Return True if `one` is faster than `other` by more than a tie."""
    return other.estimate.step_s > tie_limit_s(one.estimate.step_s, policy)


def surely_beats(one: Candidate, other: Candidate, policy: Policy) -> bool:
    """Return True if `one` beats `other` on the same machines even if estimates err."""
    lead_s = other.estimate.step_s - one.estimate.step_s
    return beats(one, other, policy) and lead_s > one.estimate.difference_error_s(other.estimate)


def first_of_fastest(
    plans: Iterable[Plan], than: Candidate, costs: CostModel, policy: Policy
) -> Candidate | None:
    """First of `plans`, in their order of preference, that fits and ties with the fastest of them;
    None if the fastest does not beat `than`."""
    fitting = [c for c in weigh(plans, costs, policy) if c.fits]
    fastest = min(fitting, key=lambda c: c.estimate.step_s, default=None)
    if fastest is None or not beats(fastest, than, policy):
        return None
    return next(c for c in fitting if not beats(fastest, c, policy))


def preferred(candidates: Sequence[Candidate], policy: Policy) -> Candidate:
    """Best of the plans that fit, by the policy's objective.

    `time` takes the fastest, `memory` the smallest, `tree` the simplest of those that tie with the
    fastest. Remaining ties are broken by the plan's text, so that the same facts give the same
    decision.
    """
    match policy.objective:
        case Objective.TIME:
            return min(candidates, key=fastest_first)
        case Objective.MEMORY:
            return min(candidates, key=smallest_first)
    return min(ties(candidates, policy), key=simplest_first)


def ties(candidates: Sequence[Candidate], policy: Policy) -> list[Candidate]:
    """Candidates within the margin of the fastest, and the fastest itself."""
    limit_s = tie_limit_s(min(c.estimate.step_s for c in candidates), policy)
    return [c for c in candidates if c.estimate.step_s <= limit_s]


def simplest_first(candidate: Candidate) -> tuple[tuple[int, ...], float, str]:
    """Sort key among plans that tie."""
    return simplicity(candidate.plan), candidate.estimate.step_s, str(candidate.plan)


def fastest_first(candidate: Candidate) -> tuple[float, tuple[int, ...], str]:
    """Sort key by time, then simplicity."""
    return candidate.estimate.step_s, simplicity(candidate.plan), str(candidate.plan)


def smallest_first(candidate: Candidate) -> tuple[float, float, str]:
    """Sort key by memory, then time."""
    estimate = candidate.estimate
    return estimate.peak_high_bytes, estimate.step_s, str(candidate.plan)
