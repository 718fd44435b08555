"""choose: from facts and a policy to a decision."""

from __future__ import annotations

from collections.abc import Sequence

from advisor.cost import CostModel
from advisor.decide import async_updates, gradient_comm
from advisor.decide.comparison import Kind, best_of, compare, is_hybrid, kind, shape, title
from advisor.decide.decide import Choice, decide
from advisor.decide.decision import Alternative, Decision, runner_up
from advisor.decide.infeasible import no_plan
from advisor.decide.reasons import reasons
from advisor.decide.tree import TreeTrace, in_leaf, names_hybrids
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Objective, Policy
from advisor.inputs.stacks import with_stack
from advisor.search.cache import SearchCache
from advisor.search.legal import Styles
from advisor.search.ranking import Candidate, beats, fastest_first
from engines.plan import PartialPlan
from profiles.units import format_percent, format_seconds

_DEFAULT = Policy()
_ALL_OPEN = PartialPlan()


def choose(
    facts: Facts,
    *,
    policy: Policy = _DEFAULT,
    partial: PartialPlan = _ALL_OPEN,
    styles: Styles | None = None,
) -> Decision:
    """Decide on a plan for these facts, and give the reasons: see `decide`.

    Raises:
        PlanError: `partial` allows no legal plan, or contradicts the stack.
        NoPlanError: there are legal plans and none fits.
    """
    partial, cache = with_stack(partial, facts.stack), SearchCache(CostModel(facts))
    choice = decide(
        facts, policy=policy, partial=partial, styles=styles, compares=True, cache=cache
    )
    winner, weighed, trace = choice.winner, choice.weighed, choice.trace
    if winner is None:
        raise no_plan(facts, policy, partial, choice)
    fastest_s = (choice.fastest or winner).estimate.step_s
    others = _alternatives(weighed, winner, policy, trace, fastest_s)
    second = runner_up(others)
    return Decision(
        plan=winner.plan,
        estimate=winner.estimate,
        facts=facts,
        policy=policy,
        partial=partial,
        reasons=tuple(
            reasons(
                winner,
                choice.pool,
                cache.costs,
                policy,
                trace,
                partial,
                second,
                weighed,
                choice.overruled,
            )
        ),
        trace=trace,
        fastest_s=fastest_s,
        alternatives=_shown(others, second, policy, trace),
        weighed=choice.total,
        estimated=choice.estimated,
        rejected=choice.rejected,
        dissent=_dissent(winner, choice, policy, trace),
        offers=tuple(offer(faster, winner) for faster in choice.offered),
    )


def offer(faster: Candidate, winner: Candidate) -> str:
    """Describe a faster plan that changes the training, and the option that allows it."""
    plan, step_s = faster.plan, faster.estimate.step_s
    if settings := async_updates.settings(plan):
        risk, option = async_updates.risk(plan), "stale"
    else:
        settings, risk, option = gradient_comm.settings(plan), gradient_comm.risk(plan), "lossy"
    return (
        f"{settings} is predicted {winner.estimate.step_s / step_s:.1f} times as fast"
        f" ({format_seconds(step_s)} a step); {risk}; only `--allow-{option}`"
        f" (`allow_{option}=True`) takes it"
    )


def _alternatives(
    weighed: Sequence[Candidate],
    winner: Candidate,
    policy: Policy,
    trace: TreeTrace,
    fastest_s: float,
) -> list[Alternative]:
    """Return the best plan of every other kind, and of the winner's kind with other degrees."""
    kinds: dict[Kind, list[Candidate]] = {}
    for candidate in weighed:
        if shape(candidate.plan) != shape(winner.plan):
            kinds.setdefault(kind(candidate.plan), []).append(candidate)
    alternatives = []
    for group in kinds.values():
        best = best_of(group, policy.by_numbers)
        verdict, because = compare(best, winner, policy, trace, fastest_s=fastest_s)
        alternatives.append(
            Alternative(
                title=title(best.plan),
                plan=best.plan,
                verdict=verdict,
                step_s=best.estimate.step_s if best.fits else None,
                peak_bytes=best.estimate.peak_bytes,
                peak_high_bytes=best.estimate.peak_high_bytes,
                because=because,
            )
        )
    is_memory = policy.objective is Objective.MEMORY
    alternatives.sort(
        key=lambda a: (
            a.step_s is None,
            a.peak_high_bytes if is_memory or a.step_s is None else a.step_s,
            a.title,
        )
    )
    return alternatives


def _shown(
    others: Sequence[Alternative], second: Alternative | None, policy: Policy, trace: TreeTrace
) -> tuple[Alternative, ...]:
    """Return the first alternatives, as many as the policy shows.

    They include the runner-up and, if the tree names hybrids, the best plan with PP and TP.
    """
    always = [second]
    if names_hybrids(trace):
        always += [next((other for other in others if is_hybrid(other.plan)), None)]
    required = [other for other in others if other in always]
    rest = [other for other in others if other not in required]
    shown = required + rest[: max(0, policy.alternatives - len(required))]
    return tuple(other for other in others if other in shown)


def _dissent(winner: Candidate, choice: Choice, policy: Policy, trace: TreeTrace) -> str | None:
    """Describe the fastest plan outside the tree's leaf, if it beats the tree's by more than a
    tie."""
    preferred, fastest = choice.overruled, winner
    ending = "it is taken, as speed and links were timed here"
    if preferred is None:
        outside = [c for c in choice.fitting if not in_leaf(c.plan, trace)]
        if policy.objective is not Objective.TREE or not outside:
            return None
        preferred, fastest = winner, min(outside, key=fastest_first)
        ending = "`--objective time` takes it"
        if not beats(fastest, winner, policy):
            return None
    gain = preferred.estimate.step_s - fastest.estimate.step_s
    return (
        f"{title(fastest.plan)} is predicted {format_percent(gain / preferred.estimate.step_s)}"
        f" faster ({format_seconds(fastest.estimate.step_s)}) although the tree passes it over:"
        f" {ending}"
    )
