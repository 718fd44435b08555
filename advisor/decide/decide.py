"""decide: which of the legal plans is taken. `advisor.decide.choose` adds the argument for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from advisor.cost import CostModel
from advisor.decide.async_updates import apart
from advisor.decide.candidates import refuse, searched
from advisor.decide.comparison import Kind, best_of, cuts_both_ways, kind
from advisor.decide.gradient_comm import sending
from advisor.decide.offload import attempts, hopeless
from advisor.decide.tree import Family, Trace, belongs, in_leaf, names_hybrids
from advisor.decide.walk import walk
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Objective, Policy
from advisor.search.cache import Kept
from advisor.search.legal import Styles, expert_degrees
from advisor.search.ranking import (
    Candidate,
    fastest_first,
    simplest_first,
    smallest_first,
    tie_limit_s,
)
from advisor.search.search import Rows, Search
from engines.plan import DataParallel, Offload, OffloadTo, PartialPlan, Plan, Schedule

_DEFAULT = Policy()
_ALL_OPEN = PartialPlan()
# So many plans are all estimated, a fraction of a second: then what is said of them is complete.
_FEW_ROWS = 256
# Plans of one kind that are estimated to find its best: another kind is shown for comparison, and
# what takes longer to tell is not shown.
_MOST_OF_A_KIND = 12
# What published runs of stages with split layers take, in 1F1B (Megatron-LM, arXiv:2104.04473;
# Llama 3, arXiv:2407.21783). Of many rows the best of all would take longer than all the rest.
_USUAL_OF_HYBRIDS = (
    DataParallel.NONE,
    DataParallel.REPLICATE,
    DataParallel.ZERO1,
    DataParallel.FULL_SHARD,
)


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
    trace: Trace
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
    kept: Kept | None = None,
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
        kept: of these facts, where others were decided on before.

    Raises:
        PlanError: `partial` allows no legal plan.
    """
    kept = kept or Kept(CostModel(facts))
    spaces = [partial.fixing(ep=ep) if ep > 1 else partial for ep in expert_degrees(facts, partial)]
    # One answer for all degrees of experts: where some of them spare cp, the others need none.
    is_long = not partial.fixes("cp") and kept.is_too_long(partial, styles)
    searches = [searched(kept, each, policy, styles=styles, is_long=is_long) for each in spaces]
    if not any(len(search.space) for search in searches):
        raise refuse(facts, partial)
    trace = walk(kept.costs, policy)
    taken = _preferred(searches, policy, trace)
    if taken is None:
        taken, outside = _outside(kept, partial, policy, trace, styles=styles)
        searches += outside
    winner = taken.winner if taken else None
    fastest = taken.fastest if taken else None
    left_open: set[Kind] = set()
    if winner is None:
        _nearest(searches)
    elif compares:
        for search in searches:
            left_open |= _compare_kinds(search, winner, policy)
    if winner is not None and compares and not cuts_both_ways(winner.plan):
        left_open -= _tell_hybrids(searches, policy, trace)
    if winner is None and not any(search.weighed for search in searches):
        raise RuntimeError("none of the plans could be estimated: see the first one's warning")
    offered: tuple[Candidate, ...] = ()
    # Of a kind that is left open nothing is said but of its best plan, if that was taken or is
    # what ties are measured by.
    left_open -= {kind(each.plan) for each in (winner, fastest) if each}
    weighed = [c for search in searches for c in search.weighed if kind(c.plan) not in left_open]
    if winner is not None:
        found, offered = _refined(searches[-1], winner, kept.costs, policy, trace, partial)
        if found is not winner and fastest is not None:
            weighed += [found]
            fastest = min(fastest, found, key=fastest_first)
        winner = found
    fitting = [c for c in weighed if c.fits]
    of_leaf = [c for c in fitting if in_leaf(c.plan, trace)]
    follows = policy.objective is Objective.TREE and bool(of_leaf)
    if follows and winner is not None and winner not in of_leaf and not winner.plan.updates_in_step:
        of_leaf.append(winner)
    return Choice(
        winner=winner,
        fastest=fastest,
        pool=of_leaf if follows else fitting,
        fitting=fitting,
        weighed=weighed,
        trace=trace,
        total=sum(len(search.space) for search in searches),
        estimated=sum(len(search.weighed) for search in searches),
        rejected=dict(sorted(sum((s.left_out for s in searches), Counter()).items())),
        kinds=[plan for search in searches for plan, _ in search.kinds()],
        offered=offered,
    )


def _nearest(searches: Sequence[Search]) -> None:
    """Estimate the plan that misses memory by least, for every way to offload."""
    least: dict[tuple[Offload, OffloadTo], float] = {}
    for search in sorted(searches, key=lambda search: search.least_missing_bytes):
        way = search.space.offload, search.space.offload_to
        nearest = search.nearest(search.rows, below_bytes=least.get(way, np.inf))
        if nearest is not None and nearest.finding is not None:
            least[way] = nearest.finding.missing_bytes


def _outside(
    kept: Kept, partial: PartialPlan, policy: Policy, trace: Trace, *, styles: Styles | None
) -> tuple[_Taken | None, list[Search]]:
    """The best plan of the first attempt to keep something outside the device of which one fits,
    and all that was searched for it."""
    searches: list[Search] = []
    short: list[Offload] = []
    for attempt in attempts(kept.costs.facts, partial):
        first = len(searches)
        for offload in attempt.kinds:
            if attempt.to is OffloadTo.HOST and hopeless(offload, short):
                continue
            wanted = attempt.partial(partial)
            search = searched(kept, wanted, policy, styles=styles, offload=offload)
            searches.append(search)
            search.fastest(search.rows)
            if search.left_out["fits-host"]:
                short.append(offload)
        taken = _preferred(searches[first:], policy, trace)
        if taken is not None:
            return taken, searches
    return None, searches


def _refined(
    search: Search,
    winner: Candidate,
    costs: CostModel,
    policy: Policy,
    trace: Trace,
    partial: PartialPlan,
) -> tuple[Candidate, tuple[Candidate, ...]]:
    """The winner, or the fastest DDP plan with another way for its gradients to go or with ranks
    that update apart; and what would be faster still, but needs the user's word."""
    of_ddp = [rows for plan, rows in search.kinds() if belongs(plan, Family.DDP)]
    replicas = search.fastest(np.concatenate(of_ddp)) if of_ddp else None
    follows = policy.objective is Objective.TREE and in_leaf(winner.plan, trace)
    may_send = replicas is None or not follows or in_leaf(replicas.plan, trace)
    sent = sending(winner, replicas if may_send else None, costs, policy, partial)
    updates = apart(sent.winner, replicas, costs, policy, trace, partial)
    fastest_s = updates.winner.estimate.step_s
    offers = [offer for offer in (sent.offered, updates.offered) if offer is not None]
    return updates.winner, tuple(o for o in offers if o.estimate.step_s < fastest_s)


@dataclass(frozen=True, slots=True)
class _Taken:
    """The preferred plan of some searches, and the fastest of those it was taken from."""

    winner: Candidate
    fastest: Candidate


def _preferred(searches: Sequence[Search], policy: Policy, trace: Trace) -> _Taken | None:
    """Of the tree's families where one of their plans fits and the policy follows it; else of all.

    The fastest is found over all searches first, so that one limit holds for what ties with it.
    """
    if policy.objective is Objective.TREE:
        taken = _preferred_of([(s, _rows_in_leaf(s, trace)) for s in searches], policy)
        if taken is not None:
            return taken
    return _preferred_of([(search, search.rows) for search in searches], policy)


def _preferred_of(pool: Sequence[tuple[Search, Rows]], policy: Policy) -> _Taken | None:
    if policy.objective is Objective.MEMORY:
        smallest = [found for search, rows in pool if (found := search.smallest(rows))]
        winner = min(smallest, key=smallest_first, default=None)
        return _Taken(winner, winner) if winner else None
    every = [found for search, rows in pool if (found := search.fastest(rows))]
    fastest = min(every, key=fastest_first, default=None)
    if fastest is None or policy.objective is not Objective.TREE:
        return _Taken(fastest, fastest) if fastest else None
    limit_s = tie_limit_s(fastest.estimate.step_s, policy)
    tied = [found for search, rows in pool if (found := search.simplest(rows, limit_s))]
    return _Taken(min(tied, key=simplest_first), fastest)


def _rows_in_leaf(search: Search, trace: Trace) -> Rows:
    of_leaf = [rows for plan, rows in search.kinds() if in_leaf(plan, trace)]
    return np.concatenate(of_leaf) if of_leaf else search.rows[:0]


def _compare_kinds(search: Search, winner: Candidate, policy: Policy) -> set[Kind]:
    """Estimate what the winner is set against: few rows all, else the best of every kind that keeps
    the model in one piece and of the others that may be fastest. The kinds that are left open."""
    if len(search.space) <= _FEW_ROWS:
        search.weigh_all()
        return set()
    groups = [(plan, search.besides(rows, winner.plan)) for plan, rows in search.kinds()]
    groups.sort(key=lambda group: (group[0].pp * group[0].tp > 1, search.least_step_s(group[1])))
    shown = policy.alternatives + sum(plan.pp * plan.tp == 1 for plan, _ in groups)
    return {
        kind(plan)
        for number, (plan, rows) in enumerate(groups)
        if not _is_told(
            search, rows, is_shown=number < shown, is_own=kind(plan) == kind(winner.plan)
        )
    }


def _tell_hybrids(searches: Sequence[Search], policy: Policy, trace: Trace) -> set[Kind]:
    """Estimate the best plan of stages with split layers, where the tree names them; its kind."""
    if not names_hybrids(trace):
        return set()
    found = []
    for search in searches:
        kinds = [(p, r) for p, r in search.kinds() if cuts_both_ways(p) and in_leaf(p, trace)]
        rows = np.concatenate([r for _, r in kinds]) if kinds else search.rows[:0]
        if len(rows) > _FEW_ROWS:
            usual = [r for p, r in kinds if p.data_parallel in _USUAL_OF_HYBRIDS]
            rows = np.concatenate(usual) if usual else rows
            rows = search.with_schedule(rows, Schedule.ONE_F_ONE_B)
        best = search.strongest(rows)
        found += [best] if best is not None else []
    if not found:
        return set()
    return {kind(best_of(found, policy.by_numbers).plan)}


def _is_told(search: Search, rows: Rows, *, is_shown: bool, is_own: bool) -> bool:
    """Whether the best of `rows` is known now. Of the winner's own kind it always is: it is weighed
    already, and a plan of it is the first that one would rather have taken."""
    if is_own:
        search.strongest(rows)
        return True
    return is_shown and search.strongest(rows, most=_MOST_OF_A_KIND) is not None
