"""Suggestions: precision, fewer devices, another batch, or a lever that would pay.

Each is estimated and reported with its gain. Few plans are estimated: a new decision is made only
if a bound shows that it may pay, or the search space is small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from advisor.cost import CostModel
from advisor.decide.comparison import recomputed_blocks, signed_percent, title
from advisor.decide.decide import decide
from advisor.decide.decision import Decision
from advisor.inputs import precision
from advisor.inputs.changed_facts import with_8_bit_states
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Objective
from advisor.inputs.resize import devices_in_words, next_multiple, on
from advisor.search.ranking import Candidate, beats, tie_limit_s, weigh
from advisor.search.space import RECOMPUTES
from engines.legality import problems
from engines.plan import Offload, PartialPlan, Plan, Recompute
from profiles.errors import InputError
from profiles.units import format_count, format_seconds

# Deciding again among so many plans takes a fraction of a second; above it, only plans with the
# same degrees are considered.
_MANY_ROWS = 20_000


def with_suggestions(decision: Decision) -> Decision:
    """Return the decision with its suggestions."""
    return decision.model_copy(update={"suggestions": tuple(suggestions(decision))})


def suggestions(decision: Decision) -> Iterator[str]:
    """Yield sentences, each with its gain."""
    yield from _precision(decision)
    if decision.policy.objective is Objective.MEMORY:
        return  # speed is not the objective
    yield from _another_batch(decision)
    yield from _fewer_devices(decision)
    yield from _levers(decision)


def _precision(decision: Decision) -> Iterator[str]:
    """Cost of fp32 if bf16 was chosen by default, or the gain of bf16."""
    facts = decision.facts
    said = precision.hint(facts)
    if said:
        yield said
    is_named = "precision" in facts.workload.given or decision.partial.fixes("precision")
    if is_named or facts.workload.precision != "bf16" or facts.model.dtype != "float32":
        return
    workload = facts.workload.model_copy(update={"precision": "fp32"})
    words = "bf16 with fp32 masters, as no precision was named; "
    changed = facts.model_copy(update={"workload": workload})
    if decision.weighed > _MANY_ROWS:
        winner = _winner(decision, changed, partial=_spread_as(decision))
        missing = "this way of spreading does not fit"
    else:
        winner, missing = _winner(decision, changed), "nothing fits"
    if winner is None:
        yield f"{words}in fp32 {missing}"
        return
    times = winner.estimate.step_s / decision.estimate.step_s
    yield (
        f"{words}in fp32 a step takes {format_seconds(winner.estimate.step_s)} ({times:.1f} times"
        f' as long) by {title(winner.plan)}: `--precision fp32` (`precision="fp32"`)'
    )


def _another_batch(decision: Decision) -> Iterator[str]:
    """Suggest a batch that the devices can split evenly if this one leaves some of them less to
    do."""
    facts, world = decision.facts, decision.facts.cluster.world_size
    batch = facts.workload.global_batch_size
    wanted = next_multiple(batch, world)
    if wanted == batch or wanted >= 2 * batch:
        return  # twice the batch is another training
    winner = _winner(decision, on(facts, world, batch=wanted), partial=_near(decision))
    if winner is None:
        return
    here, there = decision.estimate.samples_per_s, winner.estimate.samples_per_s
    if there > here * (1 + decision.policy.simplicity_margin):
        yield (
            f"a global batch of {wanted} in place of {batch} divides over {world} devices:"
            f" {title(winner.plan)} does {_rate(there)} samples/s, here {_rate(here)}"
        )


def _fewer_devices(decision: Decision) -> Iterator[str]:
    """Suggest the fewest devices, of a few numbers, with no longer step for the same batch."""
    facts, estimate = decision.facts, decision.estimate
    cluster, world = facts.cluster, facts.cluster.world_size
    batch = facts.workload.global_batch_size
    sharing = next(n for n in range(world - 1 or 1, 0, -1) if batch % n == 0)
    limit_s = tie_limit_s(estimate.step_s, decision.policy)
    for count in sorted({1, cluster.devices_per_node, world // 2, sharing}):
        # Fewer devices take longer to compute, whatever else they save.
        if not 0 < count < world or estimate.time.compute_s * world / count > limit_s:
            continue
        try:
            part = on(facts, count)
        except InputError:
            continue  # part of a node beside whole ones
        winner = _winner(decision, part, partial=_near(decision))
        if winner is not None and winner.estimate.step_s <= limit_s:
            yield (
                f"{devices_in_words(count)} of {world} would be enough:"
                f" {title(winner.plan)} takes {format_seconds(winner.estimate.step_s)} a step"
                f" ({_gain(decision, winner)})"
            )
            return


def _levers(decision: Decision) -> Iterator[str]:
    """Recompute or offload that smaller optimizer states would avoid."""
    plan, changed = decision.plan, with_8_bit_states(decision.facts)
    if changed is None or (plan.offload is Offload.NONE and plan.recompute is Recompute.NONE):
        return
    if plan.offload is not Offload.NONE:
        winner = _winner(decision, changed)
    else:
        winner = _fastest_that_fits(decision, changed, _with_less_recompute(plan))
    if winner is None or not beats(winner, decision.chosen, decision.policy):
        return
    is_same = recomputed_blocks(winner.plan) == recomputed_blocks(plan)
    ending = "" if is_same else _recomputed(winner.plan)
    if winner.plan.offload is not plan.offload or title(winner.plan) != title(plan):
        ending = f" by {title(winner.plan)}{ending}"
    yield (
        "8-bit AdamW (`--optimizer adamw-8bit`) would make a step"
        f" {format_seconds(winner.estimate.step_s)} ({_gain(decision, winner)}){ending}"
    )


def _recomputed(plan: Plan) -> str:
    return (
        f" with {'no recompute' if plan.recompute is Recompute.NONE else recomputed_blocks(plan)}"
    )


def _with_less_recompute(plan: Plan) -> Iterator[Plan]:
    for less in RECOMPUTES[: RECOMPUTES.index(plan.recompute)]:
        yield plan.recomputing(less)


def _fastest_that_fits(
    decision: Decision, changed: Facts, plans: Iterable[Plan]
) -> Candidate | None:
    legal = [plan for plan in plans if not problems(plan, changed.model, changed.cluster)]
    try:
        fitting = [c for c in weigh(legal, CostModel(changed), decision.policy) if c.fits]
    except InputError:
        return None  # states of 8 bits follow shapes, which not every profile has
    return min(fitting, key=lambda c: c.estimate.step_s, default=None)


def _spread_as(decision: Decision) -> PartialPlan:
    """Degrees of the chosen plan; its batch split stays open."""
    plan = decision.plan
    degrees = ("pp", "tp", "cp", "ep", "dp_replicate", "dp_shard", "data_parallel")
    taken = {name: getattr(plan, name) for name in degrees}
    return decision.partial.leaving("zero").fixing(**taken)


def _near(decision: Decision) -> PartialPlan:
    """Fixed settings of the decision; after a large search also its split and sharding, so that a
    related question takes a fraction of the time."""
    if decision.weighed <= _MANY_ROWS:
        return decision.partial
    same = ("pp", "tp", "cp", "ep", "data_parallel", "recompute")
    taken = {name: getattr(decision.plan, name) for name in same}
    return PartialPlan(**taken).fixing(**decision.partial.fixed)


def _winner(
    decision: Decision, changed: Facts, *, partial: PartialPlan | None = None
) -> Candidate | None:
    """Return the plan taken for other facts; None if nothing fits or is legal."""
    partial = decision.partial if partial is None else partial
    try:
        return decide(changed, policy=decision.policy, partial=partial, nearest=False).winner
    except InputError:
        return None


def _gain(decision: Decision, winner: Candidate) -> str:
    return signed_percent(winner.estimate.step_s / decision.estimate.step_s - 1)


def _rate(samples_per_s: float) -> str:
    return format_count(samples_per_s) if samples_per_s >= 1000 else f"{samples_per_s:.1f}"
