"""Refinements: the steps of a decision, in order, each over what the ones before have left.

A refinement takes a plan, takes a better one in its place, or estimates what the taken plan is
shown against. All of them read and write one state; `advisor.decide.decide` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from advisor.cost import CostModel
from advisor.decide.async_updates import apart
from advisor.decide.candidates import searched
from advisor.decide.comparison import Kind, best_of, cuts_both_ways, kind
from advisor.decide.gradient_comm import sending
from advisor.decide.offload import attempts, hopeless
from advisor.decide.tree import Family, TreeTrace, belongs, in_leaf, names_hybrids
from advisor.inputs.policy import Objective, Policy
from advisor.search.cache import SearchCache
from advisor.search.legal import Styles
from advisor.search.ranking import (
    Candidate,
    fastest_first,
    simplest_first,
    smallest_first,
    tie_limit_s,
)
from advisor.search.search import Rows, Search
from engines.plan import DataParallel, Offload, OffloadTo, PartialPlan, Schedule

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


@dataclass(slots=True)
class Deciding:
    """A decision on its way.

    Attributes:
        searches: over the legal plans; those with something offloaded come last.
        compares: estimate the best plan of every other kind too.
        nearest: where nothing fits, estimate the plans that miss memory by least.
        winner: the plan that is taken so far; None where nothing fits.
        fastest: the fastest plan of those that it was taken from: ties are within the margin of it.
        built: plans that no search has as a row.
        offered: faster than the winner, but the training is another: what no user allowed.
        open_kinds: kinds whose best plan would take too long to find.
    """

    kept: SearchCache
    partial: PartialPlan
    policy: Policy
    trace: TreeTrace
    styles: Styles | None
    compares: bool
    nearest: bool
    searches: list[Search]
    winner: Candidate | None = None
    fastest: Candidate | None = None
    built: list[Candidate] = field(default_factory=list)
    offered: list[Candidate] = field(default_factory=list)
    open_kinds: set[Kind] = field(default_factory=set)

    @property
    def costs(self) -> CostModel:
        return self.kept.costs

    @property
    def follows_tree(self) -> bool:
        return self.policy.objective is Objective.TREE

    def take(self, searches: Sequence[Search]) -> bool:
        """Take the preferred plan of `searches`; False where none of theirs fits."""
        taken = _preferred(searches, self.policy, self.trace)
        if taken is not None:
            self.winner, self.fastest = taken.winner, taken.fastest
        return taken is not None

    def replace(self, candidate: Candidate, offered: Candidate | None) -> None:
        """Take `candidate`, which was built from a row, and note what may be offered."""
        if candidate is not self.winner and self.fastest is not None:
            self.built.append(candidate)
            self.fastest = min(self.fastest, candidate, key=fastest_first)
        self.winner = candidate
        self.offered += [offered] if offered is not None else []

    @property
    def weighed(self) -> list[Candidate]:
        """Plans that were estimated exactly: all that an answer depends on.

        Of a kind that is left open nothing is said but of its best plan, if that was taken or is
        what ties are measured by.
        """
        left_open = self.open_kinds - {kind(c.plan) for c in (self.winner, self.fastest) if c}
        rows = [candidate for search in self.searches for candidate in search.weighed]
        return [c for c in rows if kind(c.plan) not in left_open] + self.built


Refinement = Callable[[Deciding], None]


def take_preferred(deciding: Deciding) -> None:
    """Take the tree's plan, or the one that the policy asks for, with everything on the devices."""
    deciding.take(deciding.searches)


def offload_where_nothing_fits(deciding: Deciding) -> None:
    """Take the best plan of the first attempt to keep something outside the device that fits."""
    if deciding.winner is not None:
        return
    short: list[Offload] = []
    for attempt in attempts(deciding.costs.facts, deciding.partial):
        tried: list[Search] = []
        for offload in attempt.kinds:
            if attempt.to is OffloadTo.HOST and hopeless(offload, short):
                continue
            search = searched(
                deciding.kept,
                attempt.partial(deciding.partial),
                deciding.policy,
                styles=deciding.styles,
                offload=offload,
            )
            tried.append(search)
            search.fastest(search.rows)
            if search.left_out["fits-host"]:
                short.append(offload)
        deciding.searches += tried
        if deciding.take(tried):
            return


def estimate_nearest_misses(deciding: Deciding) -> None:
    """Where nothing fits, estimate the plan that misses memory by least, for every offload."""
    if deciding.winner is not None or not deciding.nearest:
        return
    least: dict[tuple[Offload, OffloadTo], float] = {}
    for search in sorted(deciding.searches, key=lambda search: search.least_missing_bytes):
        way = search.space.offload, search.space.offload_to
        nearest = search.nearest(search.rows, below_bytes=least.get(way, np.inf))
        if nearest is not None and nearest.finding is not None:
            least[way] = nearest.finding.missing_bytes


def compare_kinds(deciding: Deciding) -> None:
    """Estimate what the winner is set against: few rows all, else the best of every kind without
    stages and split layers, and of the others that may be fastest."""
    winner, policy = deciding.winner, deciding.policy
    if winner is None or not deciding.compares:
        return
    for search in deciding.searches:
        if len(search.space) <= _FEW_ROWS:
            search.weigh_all()
            continue
        groups = [
            (plan, search.with_other_degrees(rows, winner.plan)) for plan, rows in search.kinds()
        ]
        groups.sort(
            key=lambda group: (group[0].pp * group[0].tp > 1, search.least_step_s(group[1]))
        )
        shown = policy.alternatives + sum(plan.pp * plan.tp == 1 for plan, _ in groups)
        deciding.open_kinds |= {
            kind(plan)
            for number, (plan, rows) in enumerate(groups)
            if not _is_told(
                search, rows, is_shown=number < shown, is_own=kind(plan) == kind(winner.plan)
            )
        }


def compare_hybrids(deciding: Deciding) -> None:
    """Estimate the best plan of stages with split layers, where the tree names them."""
    winner, trace = deciding.winner, deciding.trace
    if winner is None or not deciding.compares or cuts_both_ways(winner.plan):
        return
    if not names_hybrids(trace):
        return
    hybrids = []
    for search in deciding.searches:
        kinds = [(p, r) for p, r in search.kinds() if cuts_both_ways(p) and in_leaf(p, trace)]
        rows = np.concatenate([r for _, r in kinds]) if kinds else search.rows[:0]
        if len(rows) > _FEW_ROWS:
            usual = [r for p, r in kinds if p.data_parallel in _USUAL_OF_HYBRIDS]
            rows = np.concatenate(usual) if usual else rows
            rows = search.with_schedule(rows, Schedule.ONE_F_ONE_B)
        best = search.strongest(rows)
        hybrids += [best] if best is not None else []
    if hybrids:
        best = best_of(hybrids, deciding.policy.by_numbers)
        deciding.open_kinds -= {kind(best.plan)}


def choose_gradient_comm(deciding: Deciding) -> None:
    """Take another way for the gradients of DDP where that is faster beyond the margin."""
    winner = deciding.winner
    if winner is None:
        return
    replicas = fastest_replicas(deciding)
    follows = deciding.follows_tree and in_leaf(winner.plan, deciding.trace)
    may_send = replicas is None or not follows or in_leaf(replicas.plan, deciding.trace)
    sent = sending(
        winner,
        replicas if may_send else None,
        deciding.costs,
        deciding.policy,
        deciding.partial,
    )
    deciding.replace(sent.winner, sent.offered)


def choose_updates(deciding: Deciding) -> None:
    """Take or offer ranks that update on their own, where links or ranks are slow."""
    if deciding.winner is None:
        return
    updates = apart(
        deciding.winner,
        fastest_replicas(deciding),
        deciding.costs,
        deciding.policy,
        deciding.trace,
        deciding.partial,
    )
    deciding.replace(updates.winner, updates.offered)


def fastest_replicas(deciding: Deciding) -> Candidate | None:
    """The fastest DDP plan of the last search."""
    search = deciding.searches[-1]
    of_ddp = [rows for plan, rows in search.kinds() if belongs(plan, Family.DDP)]
    return search.fastest(np.concatenate(of_ddp)) if of_ddp else None


REFINEMENTS: tuple[Refinement, ...] = (
    take_preferred,
    offload_where_nothing_fits,
    estimate_nearest_misses,
    compare_kinds,
    compare_hybrids,
    choose_gradient_comm,
    choose_updates,
)


@dataclass(frozen=True, slots=True)
class _Taken:
    """The preferred plan of some searches, and the fastest of those it was taken from."""

    winner: Candidate
    fastest: Candidate


def _preferred(searches: Sequence[Search], policy: Policy, trace: TreeTrace) -> _Taken | None:
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


def _rows_in_leaf(search: Search, trace: TreeTrace) -> Rows:
    of_leaf = [rows for plan, rows in search.kinds() if in_leaf(plan, trace)]
    return np.concatenate(of_leaf) if of_leaf else search.rows[:0]


def _is_told(search: Search, rows: Rows, *, is_shown: bool, is_own: bool) -> bool:
    """Whether the best of `rows` is known now. Of the winner's own kind it always is: it is weighed
    already, and a plan of it is the first that one would rather have taken."""
    if is_own:
        search.strongest(rows)
        return True
    return is_shown and search.strongest(rows, most=_MOST_OF_A_KIND) is not None
