"""Reasons: the argument for a plan, as sentences with numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from advisor.cost import CostModel, Traffic
from advisor.cost.communication.by_hand import crossed_s
from advisor.decide import async_updates, gradient_comm, loss_chunks, offload
from advisor.decide.comparison import PlanVerdict, causes, recomputed_blocks, title
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

# Share of a difference above which a part of it is named as its cause.
_CAUSE = 0.5
# Relative difference below which states at the peak and at the optimizer step are the same.
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
    overruled: Candidate | None = None,
) -> Iterator[str]:
    """Yield the need of the states, the path through the tree, and the case for this plan.

    Args:
        pool: the plans that fit, of which the winner was taken.
        second: the runner-up, as a row of the table.
        weighed: all plans, also those that do not fit.
        overruled: the plan that the tree prefers, if the winner is faster and outside its leaf.
    """
    facts = costs.facts
    yield _states_reason(winner, facts, policy)
    yield from offload.reason(winner, weighed)
    for step in trace.steps[1:]:
        yield f"{step.question} {_capitalised(step.answer)}: {step.because}"
    yield _leaf_reason(winner, policy, trace, partial, overruled)
    yield from _stages_reason(winner)
    yield from _split_reason(winner, facts)
    if not gradient_comm.is_usual(winner.plan):
        yield gradient_comm.reason(winner, costs)
    yield from async_updates.reason(winner, costs)
    yield from _sequence_reason(winner, facts, policy)
    yield from _experts_reason(winner)
    yield from _by_hand_reason(winner, costs)
    yield from loss_chunks.reason(winner, costs)
    yield from _recompute_reason(winner, costs, policy)
    yield from _runner_up_reason(winner, second, policy)
    yield from _not_replicated_reason(winner, pool, facts, policy)


def _states_reason(winner: Candidate, facts: Facts, policy: Policy) -> str:
    """Say where the model states are; at the peak they add up to those in the memory table."""
    model, memory = facts.model, winner.estimate.memory
    resident = winner.estimate.states_bytes
    whole = model.parameter_bytes + model.gradient_bytes
    whole += round(upkeep(facts.workload.optimizer, model.units).state_bytes)
    usable = format_gib(policy.usable_bytes(facts.cluster.device))
    needs = f"One copy of the model states needs {format_gib(whole)}; a device has {usable} usable"
    if winner.plan.offload.states:
        where = "files" if winner.estimate.disk_bytes else "main memory"
        share = f"Its share of {format_gib(resident)} is kept in {where}, where the optimizer runs"
        at_peak = f"; at its peak the device holds {format_gib(memory.gradients)} of gradients"
        return f"{needs}. {share}{at_peak if memory.gradients else ''}"
    if winner.plan.offload.optimizer and not memory.optimizer:
        where = "main memory" if winner.estimate.host_bytes else "files"
        return (
            f"{needs} and holds {format_gib(memory.parameters + memory.gradients)} of them at the"
            f" step's peak; its optimizer states are kept in {where} and loaded for the update of a"
            " few parameters at a time"
        )
    sentence = f"{needs} and holds {format_gib(resident)} of them"
    if abs(memory.states - resident) <= _SAME * resident:
        return sentence
    sentence += f" when the optimizer steps, and {format_gib(memory.states)} at the step's peak"
    gradients_then = resident - memory.parameters - memory.optimizer
    more = memory.gradients > gradients_then * (1 + _SAME)
    if more and winner.plan.data_parallel is DataParallel.ZERO1:
        sentence += " (gradients stay unsharded until the last microbatch)"
    if more and winner.plan.data_parallel is DataParallel.REPLICATE:
        sentence += " (with accumulation, DDP holds gradients twice)"
    return sentence


def _leaf_reason(
    winner: Candidate,
    policy: Policy,
    trace: TreeTrace,
    partial: PartialPlan,
    overruled: Candidate | None,
) -> str:
    advice = f"The tree says: {trace.advice}"
    if trace.not_weighed:
        advice += f" (not weighed yet: {', '.join(trace.not_weighed)})"
    if policy.objective is not Objective.TREE:
        wanted = "fastest" if policy.objective is Objective.TIME else "smallest"
        return f"{advice}; the {wanted} plan of all was asked for"
    if overruled is not None:
        theirs, ours = overruled.estimate, winner.estimate
        lead, error = theirs.step_s - ours.step_s, ours.difference_error_s(theirs)
        return (
            f"{advice}; but speed and links were timed here, and its best plan,"
            f" {title(overruled.plan)}, is predicted {format_seconds(theirs.step_s)}:"
            f" {format_seconds(lead)} more than this one, with an error of"
            f" {format_seconds(error)} in the difference"
        )
    if not in_leaf(winner.plan, trace):
        if not winner.plan.updates_in_step:
            return f"{advice}; asynchronous or periodic updates were allowed"
        if partial.fixes():
            return f"{advice}; with the fixed settings, no plan of these families can be taken"
        return f"{advice}; no plan of these families fits here"
    return advice


def _stages_reason(winner: Candidate) -> Iterator[str]:
    """Yield the idle time of a pipeline, and the memory of its fullest and emptiest rank."""
    estimate = winner.estimate
    if not estimate.stages:
        return
    idle = estimate.time.idle_s
    fullest, emptiest = estimate.stages[0], estimate.stages[-1]
    units = ", ".join(
        f"`{first}`" if first == last else f"`{first}` to `{last}`" for first, last in fullest.units
    )
    yield (
        f"Its stages wait {format_seconds(idle)} of a step for each other"
        f" ({format_percent(idle / estimate.step_s)}); the fullest rank holds {units}, has"
        f" {fullest.in_flight} microbatch{'es' * (fullest.in_flight > 1)} in flight and needs up to"
        f" {format_gib(fullest.peak_high_bytes)}, the emptiest"
        f" {format_gib(emptiest.peak_high_bytes)}"
    )


def _split_reason(winner: Candidate, facts: Facts) -> Iterator[str]:
    """Yield the traffic of tensor parallelism."""
    plan, estimate = winner.plan, winner.estimate
    tensor = [t for t in estimate.traffic if (t.group_size, t.stride) == (plan.tp, 1)]
    if plan.tp == 1 or not tensor:
        return
    share = facts.stack.overlap_tensor
    overlap = f"{share:.0%} of it overlaps with matrix products" if share else "none of it overlaps"
    yield f"Split layers send {_sent(tensor)}; {overlap}"


def _sequence_reason(winner: Candidate, facts: Facts, policy: Policy) -> Iterator[str]:
    """Yield the reason for context parallelism, and its traffic."""
    plan = winner.plan
    if plan.cp == 1:
        return
    needed = one_sample_bytes(facts, plan.precision, ep=plan.ep)
    usable = policy.usable_bytes(facts.cluster.device)
    batch, replicas = facts.workload.global_batch_size, plan.data_degree * plan.cp
    if needed <= usable and batch % replicas:
        yield (
            f"{batch:,} samples do not divide over {replicas:,} ranks: {plan.cp} of them shard each"
            f" sequence; {_exchanged(winner, 'keys and values')}"
        )
        return
    yield (
        f"A sample of {facts.model.tokens_per_sample:,} tokens needs up to {format_gib(needed)} on"
        f" one device, with full recompute and everything sharded, of {format_gib(usable)} usable:"
        f" {plan.cp} ranks shard its sequence; {_exchanged(winner, 'keys and values')}"
    )


def _experts_reason(winner: Candidate) -> Iterator[str]:
    """Yield the traffic of expert parallelism."""
    if winner.plan.ep > 1:
        yield f"{winner.plan.ep} ranks share the experts; {_exchanged(winner, 'tokens')}"


def _by_hand_reason(winner: Candidate, costs: CostModel) -> Iterator[str]:
    """Yield the traffic between the devices of a rank, if the module's author placed it."""
    plan, model = winner.plan, costs.facts.model
    crossings = model.crossings.get(costs.numerics(plan), ())
    if not crossings:
        return
    ledger = costs.ledger()
    seconds = crossed_s(plan, model, costs.numerics(plan), ledger)
    traffic = ledger.traffic()
    sent = sum(each.bus_bytes for each in traffic) + ledger.host_bytes
    links = [each.link for each in traffic] + ["the link to the host"] * bool(ledger.host_bytes)
    cuts = dict.fromkeys(f"{each.source} to {each.target}" for each in crossings)
    yield (
        f"The model is split by hand: transfers from {', '.join(cuts)} and back take"
        f" {format_seconds(seconds)} for {format_gib(sent)} a step and rank over"
        f" {' and '.join(dict.fromkeys(links))}; while one device computes the others wait"
    )


def _exchanged(winner: Candidate, what: str) -> str:
    """Describe the traffic whose purpose names `what`."""
    traffic = [each for each in winner.estimate.traffic if what in each.purpose]
    return f"exchange of {what}: {_sent(traffic)}"


def _sent(traffic: Sequence[Traffic]) -> str:
    """Describe traffic by its bytes, links and time."""
    nbytes = format_gib(sum(each.bus_bytes for each in traffic))
    links = " and ".join(dict.fromkeys(each.link for each in traffic))
    seconds = format_seconds(sum(each.seconds for each in traffic))
    return f"{nbytes} a step and device over {links}, in {seconds}"


def _recompute_reason(winner: Candidate, costs: CostModel, policy: Policy) -> Iterator[str]:
    if winner.plan.recompute is Recompute.NONE:
        return
    plan = winner.plan
    plain = costs.estimate(plan.recomputing(Recompute.NONE))
    if plain.fits(policy.usable_bytes(costs.facts.cluster.device)):
        return
    saved = plain.peak_high_bytes - winner.estimate.peak_high_bytes
    ending = ""
    if plan.recompute_blocks is not None:
        all_s = costs.estimate(plan.recomputing(plan.recompute)).step_s
        more = format_seconds(max(0.0, all_s - winner.estimate.step_s))
        ending = f"; of all blocks a step would take {more} more"
    yield (
        f"{_capitalised(recomputed_blocks(plan))} saves {format_gib(saved)} and costs"
        f" {format_seconds(winner.estimate.time.recompute_s)} a step; without it this"
        f" microbatch does not fit{ending}"
    )


def _runner_up_reason(
    winner: Candidate, other: Alternative | None, policy: Policy
) -> Iterator[str]:
    """Yield the difference to the runner-up, or that they tie, as its row of the table says."""
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


def _not_replicated_reason(
    winner: Candidate, pool: Sequence[Candidate], facts: Facts, policy: Policy
) -> Iterator[str]:
    """Yield the reason against DDP of a model that fits unsharded."""
    families = (Family.SINGLE, Family.DDP)
    unsharded = [c for c in pool if any(belongs(c.plan, family) for family in families)]
    if policy.objective is not Objective.TREE or not unsharded or winner in unsharded:
        return
    simple, fastest = _fastest(unsharded), _fastest(pool)
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
            sentence += " (autocast casts weights and inputs one by one, FSDP a unit at a time)"
    yield sentence


def _fastest(candidates: Sequence[Candidate]) -> Candidate:
    return min(candidates, key=fastest_first)


def _capitalised(words: str) -> str:
    return words[:1].upper() + words[1:]
