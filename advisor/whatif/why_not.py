"""Alternative settings: the best plan that has them, compared with the plan taken."""

from __future__ import annotations

from advisor.cost import CostModel, Estimate
from advisor.decide.candidates import nearest_settings, searched, why_illegal
from advisor.decide.comparison import PlanVerdict, best_of, compare
from advisor.decide.decision import Decision
from advisor.inputs.policy import Objective
from advisor.inputs.wrapped import ShownAsText
from advisor.search.cache import SearchCache
from advisor.search.ranking import Candidate, tie_limit_s
from engines.plan import PartialPlan, Plan, read_settings
from profiles.record import Record


class WhyNot(ShownAsText, Record):
    """Answer to "why not this setting?": the best plan that has it, compared with the choice.

    `plan` and `estimate` are None if the setting is not legal.
    """

    settings: str
    verdict: PlanVerdict
    because: str
    plan: Plan | None = None
    estimate: Estimate | None = None

    def __str__(self) -> str:
        lines = [f"{self.settings}: {self.verdict}", f"  {self.because}"]
        if self.plan is not None:
            lines.append(f"  best plan with it: {self.plan}")
        return "\n".join(lines)


def why_not(decision: Decision, settings: str) -> WhyNot:
    """See `Decision.why_not`."""
    asked = read_settings(settings)
    partial = _without_conflicts(decision.partial, asked).fixing(**asked.fixed)
    best = _best(decision, partial)
    if best is None:
        why = [problem.what for problem in why_illegal(decision.facts, partial)]
        why += nearest_settings(decision.facts, partial)
        return WhyNot(settings=settings, verdict=PlanVerdict.NOT_LEGAL, because="; ".join(why))
    was_open = all(getattr(partial, key) == value for key, value in decision.partial.fixed.items())
    verdict, because = compare(
        best,
        decision.chosen,
        decision.policy,
        decision.trace,
        fastest_s=decision.fastest_step_s,
        was_open=was_open,
    )
    return WhyNot(
        settings=settings,
        verdict=verdict,
        because=because,
        plan=best.plan,
        estimate=best.estimate,
    )


def _best(decision: Decision, partial: PartialPlan) -> Candidate | None:
    """The preferred plan with `partial`; with a chunked loss too, if the choice has one."""
    cache, policy = SearchCache(CostModel(decision.facts)), decision.policy
    ways = [partial]
    if decision.plan.loss_chunks > 1 and not partial.fixes("loss_chunks"):
        ways.append(partial.fixing(loss_chunks=decision.plan.loss_chunks))
    searches = [searched(cache, way, policy) for way in ways]
    if policy.objective is Objective.TREE:
        limit_s = tie_limit_s(decision.fastest_step_s, policy)
        tied = (search.simplest(search.rows, limit_s) for search in searches)
        first = next(filter(None, tied), None)
        if first is not None:
            return first
    known = [search.strongest(search.rows) for search in searches]
    candidates = [candidate for candidate in known if candidate is not None]
    return best_of(candidates, policy) if candidates else None


_DEGREES = frozenset({"dp_replicate", "dp_shard", "zero", "data_parallel"})
_CUTS = frozenset({"microbatch_size", "microbatches", "accumulation"})


def _without_conflicts(partial: PartialPlan, asked: PartialPlan) -> PartialPlan:
    """`partial`, where a new degree or cut in `asked` leaves the others of its group open."""
    groups = (_DEGREES | {"pp", "tp", "cp"}, _CUTS)
    return partial.leaving(*(name for group in groups if asked.fixes(*group) for name in group))
