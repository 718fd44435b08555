"""decide: which of the legal plans is taken. `advisor.decide.choose` adds the argument for it."""

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
from advisor.search.ranking import (
    Candidate,
)
from engines.plan import PartialPlan, Plan

_DEFAULT = Policy()
_ALL_OPEN = PartialPlan()


@dataclass(frozen=True, slots=True)
class Choice:
    """What was weighed, and what was taken of it.

    Attributes:
        winner: None where nothing fits.
        fastest: the fastest plan of `pool`: what ties is within the margin of it.
        weighed: the plans that were estimated exactly: all that an answer depends on. `pool` are
            those that fit and that the winner was taken from, `fitting` all that fit.
        total: plans that were weighed, most of them by their bounds alone; `estimated` exactly.
        rejected: by rule, how many of them cannot be taken.
        kinds: a plan of every kind that was weighed; its stages are not named.
        offered: faster than the winner, but the training is another: what no user allowed.
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
    offered: tuple[Candidate, ...] = ()


def decide(
    facts: Facts,
    *,
    policy: Policy = _DEFAULT,
    partial: PartialPlan = _ALL_OPEN,
    styles: Styles | None = None,
    compares: bool = False,
    nearest: bool = True,
    kept: SearchCache | None = None,
) -> Choice:
    """The plan for these facts: deterministic, nothing else is looked at.

    Every legal plan is weighed, most of them by lower bounds (`advisor.search`). The tree's leaf
    says which families come first; the fastest plan of them that fits is taken, the simpler one on
    a tie. Something waits outside the device only where nothing else fits:
    `advisor.decide.offload`.

    Args:
        styles: how layers are split over a tp axis of some size; by default what the profile alone
            tells (`engines.tensor.rules`).
        compares: also estimate the best plan of every other kind.
        nearest: where nothing fits also estimate the plans that miss memory by least; it takes
            longer than the rest, and a caller that reads `winner` alone needs none.
        kept: of these facts, where others were decided on before.

    Raises:
        PlanError: `partial` allows no legal plan.
    """
    kept = kept or SearchCache(CostModel(facts))
    spaces = [partial.fixing(ep=ep) if ep > 1 else partial for ep in expert_degrees(facts, partial)]
    # One answer for all degrees of experts: where some of them spare cp, the others need none.
    is_long = not partial.fixes("cp") and kept.is_too_long(partial, styles)
    searches = [searched(kept, each, policy, styles=styles, is_long=is_long) for each in spaces]
    if not any(len(search.space) for search in searches):
        raise refuse(facts, partial)
    trace = walk(kept.costs, policy)
    deciding = Deciding(kept, partial, policy, trace, styles, compares, nearest, searches)
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
    follows = deciding.follows_tree and bool(of_leaf)
    if follows and winner is not None and winner not in of_leaf and not winner.plan.updates_in_step:
        of_leaf.append(winner)
    step_s = winner.estimate.step_s if winner is not None else 0.0
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
        kinds=[plan for search in searches for plan, _ in search.kinds()],
        offered=tuple(offer for offer in deciding.offered if offer.estimate.step_s < step_s),
    )
