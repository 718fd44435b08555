"""Refinements: the steps of a decision, in order.

A refinement takes a plan, replaces it by a better one, or estimates the plans that the decision is
compared with. All read and write one state; `advisor.decide.decide` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from advisor.cost import CostModel
from advisor.decide import async_updates, gradient_comm, loss_chunks, recompute_blocks
from advisor.decide.candidates import searched
from advisor.decide.comparison import Kind, best_of, is_hybrid, kind
from advisor.decide.offload import attempts, hopeless
from advisor.decide.tree import Family, TreeTrace, belongs, in_leaf, names_hybrids
from advisor.inputs.policy import Objective, Policy
from advisor.search.cache import SearchCache
from advisor.search.columns import ROUNDING
from advisor.search.legal import Styles, expert_degrees
from advisor.search.ranking import (
    FITS_HOST,
    Candidate,
    fastest_first,
    simplest_first,
    smallest_first,
    surely_beats,
    tie_limit_s,
)
from advisor.search.search import Rows, Search
from engines.plan import DataParallel, Offload, OffloadTo, PartialPlan, Schedule
from profiles.workload.stack import LOSS_CHUNKS

# Up to so many plans are all estimated, in a fraction of a second, for a complete comparison.
_FEW_ROWS = 256
# Plans of one kind to estimate at most in search of its best: other kinds are only shown for
# comparison, and one that takes longer is not shown.
_MOST_OF_A_KIND = 12
# Data parallelism in published runs with PP and TP, in 1F1B (Megatron-LM, arXiv:2104.04473;
# Llama 3, arXiv:2407.21783). The best of many rows would take longer than the rest of a decision.
_USUAL_OF_HYBRIDS = (
    DataParallel.NONE,
    DataParallel.REPLICATE,
    DataParallel.ZERO1,
    DataParallel.FULL_SHARD,
)


@dataclass(slots=True)
class Deciding:
    """State of a decision in progress.

    Attributes:
        searches: over the legal plans; those with offload come last.
        compares: estimate the best plan of every other kind too.
        nearest: if nothing fits, estimate the plans that exceed memory by least.
        winner: the plan taken so far; None if nothing fits.
        fastest: the fastest plan of those the winner was taken from; ties are within its margin.
        overruled: the plan that the tree prefers, if a faster one outside its leaf was taken.
        built: plans that are rows of no search.
        offered: faster plans that change the training and were not allowed.
        open_kinds: kinds whose best plan would take too long to find.
    """

    cache: SearchCache
    partial: PartialPlan
    policy: Policy
    trace: TreeTrace
    styles: Styles | None
    compares: bool
    nearest: bool
    searches: list[Search]
    winner: Candidate | None = None
    fastest: Candidate | None = None
    overruled: Candidate | None = None
    built: list[Candidate] = field(default_factory=list)
    offered: list[Candidate] = field(default_factory=list)
    open_kinds: set[Kind] = field(default_factory=set)

    @property
    def costs(self) -> CostModel:
        return self.cache.costs

    @property
    def follows_tree(self) -> bool:
        return self.policy.objective is Objective.TREE

    def take(self, searches: Sequence[Search]) -> bool:
        """Take the preferred plan of `searches`; return False if none of them has one that fits."""
        taken = _preferred(searches, self.policy, self.trace)
        if taken is not None:
            self.winner, self.fastest = taken.winner, taken.fastest
        return taken is not None

    def replace(self, candidate: Candidate, offered: Candidate | None) -> None:
        """Take `candidate`, a variant of a row or the winner itself, and record the offer."""
        if candidate is not self.winner and self.fastest is not None:
            self.built.append(candidate)
            self.fastest = min(self.fastest, candidate, key=fastest_first)
        self.winner = candidate
        self.offered += [offered] if offered is not None else []

    @property
    def weighed(self) -> list[Candidate]:
        """Plans that were estimated exactly: all that an answer depends on.

        An open kind has none of its plans here, unless the winner or the fastest plan is of it.
        """
        left_open = self.open_kinds - {kind(c.plan) for c in (self.winner, self.fastest) if c}
        rows = [candidate for search in self.searches for candidate in search.weighed]
        return [c for c in rows if kind(c.plan) not in left_open] + self.built


Refinement = Callable[[Deciding], None]


def take_preferred(deciding: Deciding) -> None:
    """Take the plan that the tree or the policy prefers, without offload."""
    deciding.take(deciding.searches)


def chunk_loss(deciding: Deciding) -> None:
    """Search again with a chunked loss, and take its plan if that is better."""
    costs, partial, policy = deciding.costs, deciding.partial, deciding.policy
    winner = deciding.winner
    is_open = loss_chunks.is_open(costs.facts, partial)
    if not is_open or not loss_chunks.may_pay(winner, costs, policy):
        return
    degrees = [winner.plan.ep] if winner else expert_degrees(costs.facts, partial)
    searches = [_chunked_search(deciding, ep) for ep in degrees]
    below_s = loss_chunks.limit_s(winner, policy) * (1 + ROUNDING)
    taken = _preferred(searches, policy, deciding.trace, below_s=below_s)
    if taken is not None and loss_chunks.is_better(taken.winner, winner, policy):
        deciding.searches += searches
        deciding.winner, deciding.fastest = taken.winner, taken.fastest


def _chunked_search(deciding: Deciding, ep: int) -> Search:
    """Search the plans with a chunked loss; of them those that may beat the winner, if it is known
    which rows they are."""
    winner, policy, costs = deciding.winner, deciding.policy, deciding.costs
    partial = deciding.partial.fixing(loss_chunks=LOSS_CHUNKS, **({"ep": ep} if ep > 1 else {}))
    among = None
    if winner is not None and policy.objective is not Objective.MEMORY:
        whole = next(search for search in deciding.searches if search.space.ep == ep)
        among = whole.space, loss_chunks.promising(whole, winner, costs, policy)
    return searched(deciding.cache, partial, policy, styles=deciding.styles, among=among)


def offload_where_nothing_fits(deciding: Deciding) -> None:
    """Take the best plan of the first offload attempt with one that fits."""
    if deciding.winner is not None:
        return
    short: list[Offload] = []
    for attempt in attempts(deciding.costs.facts, deciding.partial):
        tried: list[Search] = []
        for offload in attempt.kinds:
            if attempt.to is OffloadTo.HOST and hopeless(offload, short):
                continue
            search = searched(
                deciding.cache,
                attempt.partial(deciding.partial),
                deciding.policy,
                styles=deciding.styles,
                offload=offload,
            )
            tried.append(search)
            search.fastest(search.rows)
            if search.left_out[FITS_HOST]:
                short.append(offload)
        deciding.searches += tried
        if deciding.take(tried):
            return


def estimate_nearest_misses(deciding: Deciding) -> None:
    """If nothing fits, estimate the plan that exceeds memory by least, for every offload."""
    if deciding.winner is not None or not deciding.nearest:
        return
    least: dict[tuple[Offload, OffloadTo], float] = {}
    for search in sorted(deciding.searches, key=lambda search: search.least_missing_bytes):
        offload = search.space.offload, search.space.offload_to
        nearest = search.nearest(search.rows, below_bytes=least.get(offload, np.inf))
        if nearest is not None and nearest.finding is not None:
            least[offload] = nearest.finding.missing_bytes


def compare_kinds(deciding: Deciding) -> None:
    """Estimate plans to compare the winner with.

    In a small space these are all plans; in a large one the best plan of every kind without PP and
    TP, and of the other kinds that may be fastest.
    """
    winner, policy = deciding.winner, deciding.policy
    if winner is None or not deciding.compares:
        return
    for search in deciding.searches:
        if len(search.space) <= _FEW_ROWS:
            search.weigh_all()
            continue
        groups = [
            (plan, search.with_other_degrees(rows, winner.plan)) for plan, rows in search.kinds
        ]
        groups.sort(
            key=lambda group: (group[0].pp * group[0].tp > 1, search.least_step_s(group[1]))
        )
        shown = policy.alternatives + sum(plan.pp * plan.tp == 1 for plan, _ in groups)
        deciding.open_kinds |= {
            kind(plan)
            for number, (plan, rows) in enumerate(groups)
            if not _best_is_known(
                search, rows, is_shown=number < shown, is_own=kind(plan) == kind(winner.plan)
            )
        }


def compare_hybrids(deciding: Deciding) -> None:
    """Estimate the best plan with PP and TP, if the tree names such hybrids."""
    winner, trace = deciding.winner, deciding.trace
    if winner is None or not deciding.compares or is_hybrid(winner.plan):
        return
    if not names_hybrids(trace):
        return
    hybrids = []
    for search in deciding.searches:
        of_leaf = search.where(lambda plan: is_hybrid(plan) and in_leaf(plan, trace))
        rows = np.flatnonzero(of_leaf)
        if len(rows) > _FEW_ROWS:
            usual = search.where(lambda plan: plan.data_parallel in _USUAL_OF_HYBRIDS)
            rows = np.flatnonzero(of_leaf & usual) if (of_leaf & usual).any() else rows
            rows = search.with_schedule(rows, Schedule.ONE_F_ONE_B)
        best = search.strongest(rows)
        hybrids += [best] if best is not None else []
    if hybrids:
        best = best_of(hybrids, deciding.policy.by_numbers)
        deciding.open_kinds -= {kind(best.plan)}


def look_outside_leaf(deciding: Deciding) -> None:
    """Find the fastest plan that the tree passes over, if it beats the winner by more than a tie.

    Other kinds may stay open in the comparison; this one is a plan that must not be missed. On
    machines that were timed it is taken if it is faster beyond the error of the difference: the
    tree is advice for machines in general.
    """
    winner, trace = deciding.winner, deciding.trace
    is_timed = deciding.costs.facts.cluster.is_timed
    if winner is None or not (deciding.compares or is_timed) or not deciding.follows_tree:
        return
    # A plan that beats the winner takes less than this.
    below_s = winner.estimate.step_s / (1 + deciding.policy.simplicity_margin)
    fastest = None
    for search in deciding.searches:
        outside = np.flatnonzero(~search.where(lambda plan: in_leaf(plan, trace)))
        faster = search.fastest(outside, below_s=below_s)
        if faster is not None:
            fastest, below_s = faster, faster.estimate.step_s
    if fastest is None:
        return
    deciding.open_kinds -= {kind(fastest.plan)}
    if is_timed and surely_beats(fastest, winner, deciding.policy):
        taken = _preferred_of([(s, s.rows) for s in deciding.searches], deciding.policy)
        assert taken is not None
        is_sure = surely_beats(taken.winner, winner, deciding.policy)
        deciding.winner = taken.winner if is_sure else fastest
        deciding.fastest, deciding.overruled = taken.fastest, winner


def choose_gradient_comm(deciding: Deciding) -> None:
    """Take or offer other gradient communication for DDP, if it is faster beyond the margin."""
    winner = deciding.winner
    if winner is None:
        return
    replicas = fastest_replicas(deciding)
    follows = deciding.follows_tree and in_leaf(winner.plan, deciding.trace)
    if replicas is not None and follows and not in_leaf(replicas.plan, deciding.trace):
        replicas = None
    deciding.replace(
        *gradient_comm.select(winner, replicas, deciding.costs, deciding.policy, deciding.partial)
    )


def choose_updates(deciding: Deciding) -> None:
    """Take or offer asynchronous or periodic updates, if links or ranks are slow."""
    if deciding.winner is None:
        return
    deciding.replace(
        *async_updates.select(
            deciding.winner,
            fastest_replicas(deciding),
            deciding.costs,
            deciding.policy,
            deciding.trace,
            deciding.partial,
        )
    )


def recompute_fewer_blocks(deciding: Deciding) -> None:
    """Take a plan that recomputes as few blocks as fit, if it is faster by more than a tie."""
    winner, costs, policy = deciding.winner, deciding.costs, deciding.policy
    if winner is None or not recompute_blocks.is_open(costs.facts, deciding.partial, policy):
        return
    pool = [(search, search.rows) for search in deciding.searches]
    if deciding.follows_tree and in_leaf(winner.plan, deciding.trace):
        pool = [(search, _rows_in_leaf(search, deciding.trace)) for search, _ in pool]
    deciding.replace(recompute_blocks.select(winner, pool, costs, policy), None)


def fastest_replicas(deciding: Deciding) -> Candidate | None:
    """Return the fastest DDP plan of the last search."""
    search = deciding.searches[-1]
    of_ddp = [rows for plan, rows in search.kinds if belongs(plan, Family.DDP)]
    return search.fastest(np.concatenate(of_ddp)) if of_ddp else None


REFINEMENTS: tuple[Refinement, ...] = (
    take_preferred,
    chunk_loss,
    offload_where_nothing_fits,
    estimate_nearest_misses,
    compare_kinds,
    compare_hybrids,
    choose_gradient_comm,
    choose_updates,
    look_outside_leaf,
    recompute_fewer_blocks,
)


@dataclass(frozen=True, slots=True)
class _Taken:
    """Preferred plan of some searches, and the fastest of those it was taken from."""

    winner: Candidate
    fastest: Candidate


def _preferred(
    searches: Sequence[Search], policy: Policy, trace: TreeTrace, *, below_s: float = np.inf
) -> _Taken | None:
    """Return the preferred plan of the tree's families, or of all plans if the policy does not
    follow the tree or none of its families fits; None if its step is not below `below_s`.

    The fastest plan of all searches comes first: it sets one limit for ties.
    """
    if policy.objective is Objective.TREE:
        pool = [(search, _rows_in_leaf(search, trace)) for search in searches]
        taken = _preferred_of(pool, policy, below_s=below_s)
        if taken is not None:
            return taken
        if below_s < np.inf and any(search.has_fitting(rows) for search, rows in pool):
            return None
    return _preferred_of([(s, s.rows) for s in searches], policy, below_s=below_s)


def _preferred_of(
    pool: Sequence[tuple[Search, Rows]], policy: Policy, *, below_s: float = np.inf
) -> _Taken | None:
    if policy.objective is Objective.MEMORY:
        smallest = (search.smallest(rows) for search, rows in pool)
        winner = min(filter(None, smallest), key=smallest_first, default=None)
        return _Taken(winner, winner) if winner else None
    fastest: Candidate | None = None
    # A fast plan that is found early leaves out most of the other spaces.
    for search, rows in sorted(pool, key=lambda part: part[0].least_step_s(part[1])):
        # One as fast may be simpler, so equal times are not excluded.
        if fastest is not None:
            below_s = float(np.nextafter(fastest.estimate.step_s, np.inf))
        of_space = search.fastest(rows, below_s=below_s)
        fastest = min(filter(None, (fastest, of_space)), key=fastest_first, default=None)
    if fastest is None or policy.objective is not Objective.TREE:
        return _Taken(fastest, fastest) if fastest else None
    limit_s = tie_limit_s(fastest.estimate.step_s, policy)
    simplest = (search.simplest(rows, limit_s) for search, rows in pool)
    return _Taken(min(filter(None, simplest), key=simplest_first), fastest)


def _rows_in_leaf(search: Search, trace: TreeTrace) -> Rows:
    return np.flatnonzero(search.where(lambda plan: in_leaf(plan, trace)))


def _best_is_known(search: Search, rows: Rows, *, is_shown: bool, is_own: bool) -> bool:
    """Estimate the best of `rows`; return False if it is not shown or would take too long.

    The winner's own kind (`is_own`) is always estimated: it has the closest alternatives.
    """
    if is_own:
        search.strongest(rows)
        return True
    return is_shown and search.strongest(rows, most=_MOST_OF_A_KIND) is not None
