"""decide: take one of the legal plans. `advisor.decide.choose` adds the reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from advisor.cost import CostModel
from advisor.decide.candidates import refuse, searched
from advisor.decide.refinements import REFINEMENTS, Deciding
from advisor.decide.tree import TreeTrace, in_leaf
from advisor.decide.walk import walk
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Policy
from advisor.search.cache import SearchCache
from advisor.search.legal import Styles, expert_degrees
from advisor.search.ranking import Candidate, beats
from engines.plan import PartialPlan, Plan

_DEFAULT = Policy()
_ALL_OPEN = PartialPlan()


@dataclass(frozen=True, slots=True)
class Choice:
    """Result of `decide`: the plan taken, and the plans it was compared with.

    Attributes:
        winner: None if nothing fits.
        fastest: the fastest plan of `pool`; ties are within the margin of it.
        weighed: plans that were estimated exactly: all that an answer depends on. `fitting` are
            those that fit, `pool` those of them that the winner was taken from.
        total: number of plans weighed, most by bounds only; `estimated` of them exactly.
        rejected: number of plans that each rule leaves out.
        kinds: a plan of every kind that was weighed, without stages.
        overruled: the plan that the tree prefers, if the winner is faster and outside its leaf.
        offered: plans faster than the winner that change the training and were not allowed.
    """

    winner: Candidate | None
    fastest: Candidate | None
    pool: Sequence[Candidate]
    fitting: Sequence[Candidate]
    weighed: Sequence[Candidate]
    trace: TreeTrace
    total: int
    estimated: int
    rejected: dict[str, int]
    kinds: Sequence[Plan]
    overruled: Candidate | None = None
    offered: tuple[Candidate, ...] = ()


def decide(
    facts: Facts,
    *,
    policy: Policy = _DEFAULT,
    partial: PartialPlan = _ALL_OPEN,
    styles: Styles | None = None,
    compares: bool = False,
    nearest: bool = True,
    cache: SearchCache | None = None,
) -> Choice:
    """Choose the plan for these facts; deterministic.

    Every legal plan is weighed, most by lower bounds (`advisor.search`). Of the families of the
    tree's leaf, the fastest plan that fits is taken, and on a tie the simplest; of all families, if
    the machines were timed and another one is faster beyond the error of the difference. Offload is
    used only if nothing fits without it: `advisor.decide.offload`.

    Args:
        styles: splits of layers for each size of a tp axis; by default from the profile alone
            (`engines.tensor.rules`).
        compares: also estimate the best plan of every other kind.
        nearest: if nothing fits, also estimate the plans that exceed memory by least. This takes
            longer than the rest; callers that only read `winner` can skip it.
        cache: results for these facts from earlier decisions.

    Raises:
        PlanError: `partial` allows no legal plan.
    """
    cache = cache or SearchCache(CostModel(facts))
    spaces = [partial.fixing(ep=ep) if ep > 1 else partial for ep in expert_degrees(facts, partial)]
    # One answer for all expert degrees: if one of them makes cp unnecessary, the others skip it.
    is_long = not partial.fixes("cp") and cache.is_too_long(partial, styles)
    searches = [searched(cache, each, policy, styles=styles, is_long=is_long) for each in spaces]
    if not any(len(search.space) for search in searches):
        raise refuse(facts, partial, styles=styles)
    trace = walk(cache.costs, policy)
    deciding = Deciding(cache, partial, policy, trace, styles, compares, nearest, searches)
    for refine in REFINEMENTS:
        refine(deciding)
    return _choice_of(deciding)


def _choice_of(deciding: Deciding) -> Choice:
    winner, searches, trace = deciding.winner, deciding.searches, deciding.trace
    is_answer = winner is not None or not deciding.nearest
    if not is_answer and not any(search.weighed for search in searches):
        raise RuntimeError("none of the plans could be estimated: see the first one's warning")
    weighed = deciding.weighed
    fitting = [c for c in weighed if c.fits]
    of_leaf = [c for c in fitting if in_leaf(c.plan, trace)]
    follows = deciding.follows_tree and bool(of_leaf) and deciding.overruled is None
    if follows and winner is not None and winner not in of_leaf and not winner.plan.updates_in_step:
        of_leaf.append(winner)
    # Those that beat the plan they were offered for need not beat what replaced it.
    offered = (
        ()
        if winner is None
        else tuple(c for c in deciding.offered if beats(c, winner, deciding.policy))
    )
    return Choice(
        winner=winner,
        fastest=deciding.fastest,
        pool=of_leaf if follows else fitting,
        fitting=fitting,
        weighed=weighed,
        trace=trace,
        total=sum(len(search.space) for search in searches),
        estimated=sum(len(search.weighed) for search in searches),
        rejected=dict(sorted(sum((s.left_out for s in searches), Counter()).items())),
        kinds=[plan for search in searches for plan, _ in search.kinds],
        overruled=deciding.overruled,
        offered=offered,
    )
