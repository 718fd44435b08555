"""Reasons: the argument for a plan, in sentences with their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from advisor.cost import CostModel
from advisor.cost.by_hand import crossed_s
from advisor.decide import async_updates, gradient_comm, offload
from advisor.decide.comparison import PlanVerdict, causes, title
from advisor.decide.decision import Alternative
from advisor.decide.tree import Family, TreeTrace, belongs, in_leaf
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Objective, Policy
from advisor.search.legal import one_sample_bytes
from advisor.search.ranking import Candidate, fastest_first
from engines.legality import numerics
from engines.plan import DataParallel, PartialPlan, Recompute
from profiles.model.profile import Numerics
from profiles.units import format_gib, format_percent, format_seconds
from profiles.workload.optimizers import upkeep

# What makes up more than this part of a difference is called its cause.
_CAUSE = 0.5
# States at the peak that differ by less from those at the optimizer step are said once.
_SAME = 0.01


def reasons(
    winner: Candidate,
    pool: Sequence[Candidate],
    costs: CostModel,
    policy: Policy,
    trace: TreeTrace,
    partial: PartialPlan,
    second: Alternative | None,
    weighed: Sequence[Candidate] = (),
) -> Iterator[str]:
    """What the states need, the path through the tree, and why this plan among its like.

    Args:
        pool: the plans that fit and that the winner was taken from.
        second: the row of the runner-up.
        weighed: all plans, those that do not fit as well.
    """
    facts = costs.facts
    yield _states_reason(winner, facts, policy)
    yield from offload.reason(winner, weighed)
    for step in trace.steps[1:]:
        yield f"{step.question} {_capitalised(step.answer)}: {step.because}"
    yield _leaf_reason(winner, policy, trace, partial)
    yield from _stages_reason(winner)
    yield from _split_reason(winner, facts)
    if not gradient_comm.is_usual(winner.plan):
        yield gradient_comm.reason(winner, costs)
    yield from async_updates.reason(winner, costs)
    yield from _sequence_reason(winner, facts, policy)
    yield from _experts_reason(winner)
    yield from _by_hand_reason(winner, costs)
    yield from _recompute_reason(winner, costs, policy)
    yield from _runner_up_reason(winner, second, policy)
    yield from _whole_reason(winner, pool, facts, policy)


def _states_reason(winner: Candidate, facts: Facts, policy: Policy) -> str:
    """Where the model states are; at the peak it is what the table of memory adds up to."""
    model, memory = facts.model, winner.estimate.memory
    held = winner.estimate.states_bytes
    whole = model.parameter_bytes + model.gradient_bytes
    whole += round(upkeep(facts.workload.optimizer, model.units).state_bytes)
    usable = format_gib(policy.usable_bytes(facts.cluster.device))
    needs = f"One copy of the model states needs {format_gib(whole)}; a device has {usable} usable"
    if winner.plan.offload.states:
        where = "files" if winner.estimate.disk_bytes else "main memory"
        share = f"Its share of {format_gib(held)} waits in {where}, where the optimizer runs"
        at_peak = f"; at its peak the device holds {format_gib(memory.gradients)} of gradients"
        return f"{needs}. {share}{at_peak if memory.gradients else ''}"
    if winner.plan.offload.optimizer and not memory.optimizer:
        where = "main memory" if winner.estimate.host_bytes else "files"
        return (
            f"{needs} and holds {format_gib(memory.parameters + memory.gradients)} of them at the"
            f" step's peak; its optimizer states wait in {where} and come to be stepped, a few"
            " parameters' at a time"
        )
    sentence = f"{needs} and holds {format_gib(held)} of them"
    if abs(memory.states - held) <= _SAME * held:
        return sentence
    sentence += f" when the optimizer steps, and {format_gib(memory.states)} at the step's peak"
    gradients_then = held - memory.parameters - memory.optimizer
    more = memory.gradients > gradients_then * (1 + _SAME)
    if more and winner.plan.data_parallel is DataParallel.ZERO1:
        sentence += " (gradients stay whole until the last microbatch)"
    if more and winner.plan.data_parallel is DataParallel.REPLICATE:
        sentence += " (accumulating, DDP holds gradients twice)"
    return sentence


def _leaf_reason(winner: Candidate, policy: Policy, trace: TreeTrace, partial: PartialPlan) -> str:
    advice = f"The tree says: {trace.advice}"
    if trace.not_weighed:
        advice += f" (not weighed yet: {', '.join(trace.not_weighed)})"
    if policy.objective is not Objective.TREE:
        wanted = "fastest" if policy.objective is Objective.TIME else "smallest"
        return f"{advice}; the {wanted} plan was asked for, wherever it stands"
    if not in_leaf(winner.plan, trace):
        if not winner.plan.updates_in_step:
            return f"{advice}; that ranks update apart from each other was allowed"
        if partial.fixes():
            return f"{advice}; of what you left open, nothing that it names can be taken"
        return f"{advice}; of the families that are weighed, none of these fits here"
    return advice


def _stages_reason(winner: Candidate) -> Iterator[str]:
    """What a pipeline costs in standing still, and how unequal its ranks are."""
    estimate = winner.estimate
    if not estimate.stages:
        return
    idle = estimate.time.idle_s
    fullest, emptiest = estimate.stages[0], estimate.stages[-1]
    held = ", ".join(
        f"`{first}`" if first == last else f"`{first}` to `{last}`" for first, last in fullest.units
    )
    yield (
        f"Its stages wait {format_seconds(idle)} of a step for each other"
        f" ({format_percent(idle / estimate.step_s)}); the fullest rank holds {held}, keeps"
        f" {fullest.in_flight} microbatches in flight and needs up to"
        f" {format_gib(fullest.peak_high_bytes)}, the emptiest"
        f" {format_gib(emptiest.peak_high_bytes)}"
    )


def _split_reason(winner: Candidate, facts: Facts) -> Iterator[str]:
    """What split layers exchange, over which link."""
    plan, estimate = winner.plan, winner.estimate
    found = [t for t in estimate.traffic if (t.group_size, t.stride) == (plan.tp, 1)]
    if plan.tp == 1 or not found:
        return
    sent = sum(traffic.bus_bytes for traffic in found)
    links = " and ".join(dict.fromkeys(traffic.link for traffic in found))
    beside = facts.stack.overlap_tensor
    meanwhile = f"{beside:.0%} of it beside products" if beside else "nothing computes meanwhile"
    yield (
        f"Split layers send {format_gib(sent)} a step and device over {links}, in"
        f" {format_seconds(sum(traffic.seconds for traffic in found))}; {meanwhile}"
    )


def _sequence_reason(winner: Candidate, facts: Facts, policy: Policy) -> Iterator[str]:
    """Why the tokens of a sample are shared out, and what passes between the ranks."""
    plan = winner.plan
    if plan.cp == 1:
        return
    needed = one_sample_bytes(facts, plan.precision, ep=plan.ep)
    usable = policy.usable_bytes(facts.cluster.device)
    batch, replicas = facts.workload.global_batch_size, plan.data_degree * plan.cp
    if needed <= usable and batch % replicas:
        yield (
            f"{batch:,} samples do not divide over {replicas:,} ranks: {plan.cp} of them share the"
            f" tokens of a sample; {_passing(winner, 'keys and values')}"
        )
        return
    yield (
        f"A sample of {facts.model.tokens_per_sample:,} tokens needs up to {format_gib(needed)} on"
        f" one device, with full recompute and everything sharded, of {format_gib(usable)} usable:"
        f" {plan.cp} ranks share its tokens; {_passing(winner, 'keys and values')}"
    )


def _experts_reason(winner: Candidate) -> Iterator[str]:
    """What travels to experts on other ranks."""
    if winner.plan.ep > 1:
        yield f"{winner.plan.ep} ranks share the experts; {_passing(winner, 'tokens')}"


def _by_hand_reason(winner: Candidate, costs: CostModel) -> Iterator[str]:
    """What passes between the devices of a rank where its author split the module."""
    plan, model = winner.plan, costs.facts.model
    found = model.crossings.get(costs.numerics(plan), ())
    if not found:
        return
    ledger = costs.ledger()
    seconds = crossed_s(plan, model, costs.numerics(plan), ledger)
    passed = ledger.traffic()
    sent = sum(traffic.bus_bytes for traffic in passed) + ledger.host_bytes
    links = [traffic.link for traffic in passed] + ["the way to the host"] * bool(ledger.host_bytes)
    ways = dict.fromkeys(f"{each.source} to {each.target}" for each in found)
    yield (
        f"It was split by hand: what passes from {', '.join(ways)} and back, {format_gib(sent)} a"
        f" step and rank, takes {format_seconds(seconds)} over"
        f" {' and '.join(dict.fromkeys(links))}; while one device computes the others wait"
    )


def _passing(winner: Candidate, what: str) -> str:
    found = [t for t in winner.estimate.traffic if what in t.purpose]
    sent = format_gib(sum(traffic.bus_bytes for traffic in found))
    links = " and ".join(dict.fromkeys(traffic.link for traffic in found))
    seconds = format_seconds(sum(traffic.seconds for traffic in found))
    return f"{what} pass over {links}, {sent} a step and device in {seconds}"


def _recompute_reason(winner: Candidate, costs: CostModel, policy: Policy) -> Iterator[str]:
    if winner.plan.recompute is Recompute.NONE:
        return
    same = winner.plan.model_copy(update={"recompute": Recompute.NONE})
    plain = costs.estimate(same)
    if plain.fits(policy.usable_bytes(costs.facts.cluster.device)):
        return
    saved = plain.peak_high_bytes - winner.estimate.peak_high_bytes
    yield (
        f"{_capitalised(winner.plan.recompute)} recompute saves {format_gib(saved)} and costs"
        f" {format_seconds(winner.estimate.time.recompute_s)} a step; without it this"
        " microbatch does not fit"
    )


def _runner_up_reason(
    winner: Candidate, other: Alternative | None, policy: Policy
) -> Iterator[str]:
    """By how much the winner wins over the runner-up, or that it is a tie: by the verdict of that
    row of the table."""
    if other is None or other.step_s is None:
        return
    if other.verdict is PlanVerdict.LARGER:
        more = other.peak_high_bytes - winner.estimate.peak_high_bytes
        yield f"Runner-up {other.title} needs {format_gib(more)} more"
        return
    mine = winner.estimate.step_s
    percent = format_percent(abs(other.step_s - mine) / mine)
    if other.verdict is PlanVerdict.SLOWER:
        yield f"Runner-up {other.title} is {percent} slower"
        return
    tie = f"a tie (within {format_percent(policy.simplicity_margin)} of the fastest plan)"
    if other.step_s < mine:
        yield f"{other.title} is {percent} faster, {tie}: the simpler plan is taken"
        return
    loses = "equally fast" if percent == format_percent(0.0) else f"{percent} slower"
    ending = "; this one is simpler" if policy.objective is Objective.TREE else ""
    yield f"Runner-up {other.title} is {loses}, {tie}{ending}"


def _whole_reason(
    winner: Candidate, pool: Sequence[Candidate], facts: Facts, policy: Policy
) -> Iterator[str]:
    """Why a model that fits whole is not just replicated."""
    families = (Family.SINGLE, Family.DDP)
    whole = [c for c in pool if any(belongs(c.plan, family) for family in families)]
    if policy.objective is not Objective.TREE or not whole or winner in whole:
        return
    simple, fastest = _fastest(whole), _fastest(pool)
    lost = simple.estimate.step_s - fastest.estimate.step_s
    than = "" if fastest.plan == winner.plan else f" than {title(fastest.plan)}, the fastest"
    sentence = (
        f"{title(simple.plan)} is simpler and fits, but is"
        f" {format_percent(lost / fastest.estimate.step_s)} slower{than}, beyond the margin of"
        f" {format_percent(policy.simplicity_margin)}:"
        f" {causes(simple.estimate, fastest.estimate)}"
    )
    if numerics(simple.plan, facts.model) is Numerics.BF16_AUTOCAST:
        mine, best = simple.estimate.time, fastest.estimate.time
        casts = mine.compute_s + mine.launch_s - best.compute_s - best.launch_s
        if casts > _CAUSE * lost:
            sentence += " (autocast casts weights and inputs one by one, FSDP a unit at once)"
    yield sentence


def _fastest(candidates: Sequence[Candidate]) -> Candidate:
    return min(candidates, key=fastest_first)


def _capitalised(words: str) -> str:
    return words[:1].upper() + words[1:]
