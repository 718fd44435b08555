"""Rules: which plans may be taken, and which of two is preferred. They say why, never how much.

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
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Objective, Policy
from advisor.search.space import KINDS, RECOMPUTES, SCHEDULES, Integers, Row, Space
from engines.plan import DataParallel, Offload, Plan, Updates
from profiles.errors import AdvisorError
from profiles.machine.cluster import ClusterProfile
from profiles.record import Record
from profiles.units import format_gib

log = logging.getLogger(__name__)
NOT_ESTIMATED = "not-estimated"


class Finding(Record):
    """Why a plan is left out: the rule, the sentence with its numbers, and what is missing."""

    rule: str
    because: str
    missing_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that was weighed; `finding` is None where it may be taken."""

    plan: Plan
    estimate: Estimate
    finding: Finding | None = None

    @property
    def fits(self) -> bool:
        return self.finding is None


Rule = Callable[[Plan, Estimate, Facts, Policy], Finding | None]


def fits_device(plan: Plan, estimate: Estimate, facts: Facts, policy: Policy) -> Finding | None:
    """The upper end of the predicted peak stays within usable memory: OOM is the worst error."""
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
    """Offloaded states of all devices of a node stay within its main memory."""
    if not estimate.host_bytes:
        return None
    needed = host_bytes_per_node(estimate, facts.cluster)
    memory = facts.cluster.host_memory_bytes
    if memory is None:
        return Finding(
            rule="fits-host",
            because=f"needs {format_gib(needed)} of main memory per node, which is not known here",
            missing_bytes=needed,
        )
    usable = policy.usable_host_bytes(memory.value)
    if needed <= usable:
        return None
    return Finding(
        rule="fits-host",
        because=f"does not fit: needs {format_gib(needed)} of {format_gib(usable)} usable main"
        " memory per node",
        missing_bytes=needed - usable,
    )


def fits_disk(plan: Plan, estimate: Estimate, facts: Facts, policy: Policy) -> Finding | None:
    """What all devices of a node keep in files stays within what was free in their folder."""
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
    """Main memory that the offloaded states of a node's devices take."""
    return estimate.host_bytes * cluster.devices_per_node


def load_bytes_per_node(estimate: Estimate, cluster: ClusterProfile) -> float:
    """Main memory that a node's ranks take while they load: the engines want the model whole."""
    return estimate.load_bytes * cluster.devices_per_node


class Loadable(StrEnum):
    """How the engines can load a model here."""

    WHOLE = "it fits"
    BY_STAGE = "fits, loaded by stage"
    TOO_LARGE = "cannot be loaded"


def loading(plan: Plan, estimate: Estimate, facts: Facts, policy: Policy) -> Loadable:
    """Whether a node's main memory holds what its ranks build; where none is known it does.

    Stages are built one by one from the meta device (`weights=`); no engine loads shards alone.
    """
    memory = facts.cluster.host_memory_bytes
    needed = load_bytes_per_node(estimate, facts.cluster)
    usable = policy.usable_host_bytes(memory.value) if memory is not None else needed
    if needed <= usable:
        return Loadable.WHOLE
    return Loadable.BY_STAGE if needed / plan.pp <= usable else Loadable.TOO_LARGE


RULES: tuple[Rule, ...] = (fits_device, fits_host, fits_disk)


def judged(plan: Plan, costs: CostModel, policy: Policy) -> Candidate:
    """A plan with its estimate and the first rule against it."""
    estimate = costs.estimate(plan)
    findings = (rule(plan, estimate, costs.facts, policy) for rule in RULES)
    return Candidate(plan, estimate, next((one for one in findings if one is not None), None))


def weigh(plans: Iterable[Plan], costs: CostModel, policy: Policy) -> list[Candidate]:
    """Every plan that can be estimated, with the first rule against it."""
    found = []
    for plan in plans:
        with losing_one_plan(plan):
            found.append(judged(plan, costs, policy))
    return found


@contextmanager
def losing_one_plan(plan: Plan, *, is_said: bool = True) -> Iterator[None]:
    """A mistake of ours while one plan is estimated loses that plan, not the answer.

    It is logged, with its traceback where this logger shows debug messages (`advise --debug`).
    Errors about what was given concern all plans, and are raised.
    """
    try:
        yield
    except AdvisorError:
        raise
    except Exception as error:
        if not is_said:
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
    "states on the device, then the model in one piece before TP, PP and both, then DDP before"
    " ZeRO-1, ZeRO-2, FSDP and HSDP, then the plainer schedule with fewer stages, then less"
    " recompute, then smaller groups, then fewer microbatches"
)


def simplicity_columns(space: Space) -> list[Integers]:
    """`simplicity` of every row of `space`, number by number; offload is the same in all."""
    kinds = np.array([_KINDS.index(kind) for kind in KINDS])
    return [
        (space.tp * space.cp * space.ep > 1) + 2 * (space.pp > 1),
        kinds[space.kind],
        space.schedule,
        space.pp * space.per_rank,
        space.recompute,
        space.pp * space.tp * space.cp * space.ep,
        space.forwards,
    ]


def simplicity(plan: Plan | Row) -> tuple[int, ...]:
    """Less is simpler, in the order of `SIMPLER_FIRST`.

    Simple means: fewer moving parts to understand, and fewer ways to be slower than predicted. A
    model in one piece trains in the loop that its user wrote. Split layers still do, but another
    way of splitting is proved for every kind of layer; stages need `train_step`, a schedule, and
    microbatches that are even. Ranks that update apart come after all others.
    """
    return (
        int(plan.offload is not Offload.NONE) + 2 * _apart(plan),
        # 0 whole, 1 split layers, 2 stages, 3 both.
        int(max(plan.tp, plan.cp, plan.ep) > 1) + 2 * int(plan.pp > 1),
        _KINDS.index(plan.data_parallel),
        SCHEDULES.index(plan.schedule),
        len(plan.stages),
        RECOMPUTES.index(plan.recompute),
        plan.pp * plan.tp * plan.cp * plan.ep,
        plan.forwards,
    )


def _apart(plan: Plan | Row) -> int:
    """How far ranks update apart from each other: the same for all plans of a space."""
    order = (Updates.SYNCHRONOUS, Updates.LOCAL, Updates.DILOCO, Updates.ASYNCHRONOUS)
    return 2 * order.index(plan.updates) + (plan.servers > 0) + (plan.backup_workers > 0)


def tie_limit_s(fastest_s: float, policy: Policy) -> float:
    """The longest step that ties with `fastest_s`, the step of the fastest plan among those that
    are compared.

    One limit for all of them: two plans within it tie with each other as well, which margins
    between pairs of plans do not give.
    """
    return fastest_s * (1 + policy.simplicity_margin)


def beats(one: Candidate, other: Candidate, policy: Policy) -> bool:
    """Whether it is faster by more than a tie."""
    return other.estimate.step_s > tie_limit_s(one.estimate.step_s, policy)


def first_of_fastest(
    plans: Iterable[Plan], than: Candidate, costs: CostModel, policy: Policy
) -> Candidate | None:
    """The first of `plans`, which come in an order of preference, that fits and ties with the
    fastest of them; None where that one does not beat `than`."""
    found = [c for c in weigh(plans, costs, policy) if c.fits]
    fastest = min(found, key=lambda c: c.estimate.step_s, default=None)
    if fastest is None or not beats(fastest, than, policy):
        return None
    return next(c for c in found if not beats(fastest, c, policy))


def preferred(candidates: Sequence[Candidate], policy: Policy) -> Candidate:
    """The best of plans that may all be taken, by the policy's objective.

    `time` takes the fastest, `memory` the smallest; the tree's way is the simplest of those that
    tie with the fastest. What is still equal is settled by the plan's text, so that the same facts
    give the same decision.
    """
    match policy.objective:
        case Objective.TIME:
            return min(candidates, key=fastest_first)
        case Objective.MEMORY:
            return min(candidates, key=smallest_first)
    return min(ties(candidates, policy), key=simplest_first)


def ties(candidates: Sequence[Candidate], policy: Policy) -> list[Candidate]:
    """The fastest candidate and those within the margin of it."""
    limit_s = tie_limit_s(min(c.estimate.step_s for c in candidates), policy)
    return [c for c in candidates if c.estimate.step_s <= limit_s]


def simplest_first(candidate: Candidate) -> tuple[tuple[int, ...], float, str]:
    """The order in which plans that tie are preferred."""
    return simplicity(candidate.plan), candidate.estimate.step_s, str(candidate.plan)


def fastest_first(candidate: Candidate) -> tuple[float, tuple[int, ...], str]:
    """By time; on equal times the simpler one."""
    return candidate.estimate.step_s, simplicity(candidate.plan), str(candidate.plan)


def smallest_first(candidate: Candidate) -> tuple[float, float, str]:
    """By memory; on equal memory the faster one."""
    estimate = candidate.estimate
    return estimate.peak_high_bytes, estimate.step_s, str(candidate.plan)
