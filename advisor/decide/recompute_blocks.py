"""Recompute of some blocks: of as few as memory asks for.

A search weighs recompute of all blocks or of none. Between them memory and time change block by
block. The plan taken recomputes no more blocks than it must; another with as few as fit, the first
ones of each stage, is taken if it is faster by more than a tie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice, pairwise

import numpy as np

from advisor.cost import CostModel
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Objective, Policy
from advisor.inputs.stacks import is_of_engines
from advisor.search.columns import Columns, Microbatches
from advisor.search.ranking import Candidate, beats, fastest_first, weigh
from advisor.search.search import Rows, Search
from advisor.search.space import RECOMPUTES
from advisor.search.whole_peak import whole_peak_bytes
from engines.plan import PartialPlan, Plan, Recompute

# Plans beside the one taken that are looked at, each by five or six estimates.
_MOST = 8
# Share of a step that fewer blocks must save.
_WORTH = 0.01
_NONE = RECOMPUTES.index(Recompute.NONE)


def is_open(facts: Facts, partial: PartialPlan, policy: Policy) -> bool:
    """Return True if a decision may recompute some blocks: nobody fixed which, and they are our
    engines'."""
    is_fixed = partial.fixes("recompute", "recompute_blocks")
    return not is_fixed and is_of_engines(facts.stack) and policy.objective is not Objective.MEMORY


def select(
    winner: Candidate, pool: Iterable[tuple[Search, Rows]], costs: CostModel, policy: Policy
) -> Candidate:
    """Return the plan to take: `winner` with as few recomputed blocks as fit, or the fastest of the
    rows of `pool` with as few, if it beats that."""
    taken = winner
    own = _with_fewest(winner.plan, costs, policy)
    if own is not None and own.estimate.step_s * (1 + _WORTH) < winner.estimate.step_s:
        taken = own
    others = []
    for candidate in islice(_promising(taken, pool, policy), _MOST):
        fewest = _with_fewest(candidate.plan, costs, policy)
        others += [fewest] if fewest is not None else []
    fastest = min(others, key=fastest_first, default=taken)
    return fastest if beats(fastest, taken, policy) else taken


def _promising(
    taken: Candidate, pool: Iterable[tuple[Search, Rows]], policy: Policy
) -> Iterator[Candidate]:
    """Yield plans that fit with all blocks recomputed, and may beat `taken` with fewer, the most
    promising first."""
    below_s = taken.estimate.step_s / (1 + policy.simplicity_margin)
    searches, likely = [], []
    for number, (search, rows) in enumerate(pool):
        rows = rows[search.may_fit[rows] & (search.space.recompute[rows] != _NONE)]
        whole = search.space.pp[rows] == 1
        searches.append(search)
        for row, least_s in (*_of_whole(search, rows[whole], below_s), *_of_staged(search, rows)):
            likely += [(least_s, number, row)] if least_s < below_s else []
    for _, number, row in sorted(likely):
        candidate = searches[number].candidate(row)
        if candidate is not None and candidate.fits:
            yield candidate


def _of_whole(search: Search, rows: Rows, below_s: float) -> Iterator[tuple[int, float]]:
    """Yield rows without stages and about the seconds of their step with as few blocks as fit:
    memory and time of some blocks lie on a line between the bounds of none and of all."""
    space, bounds = search.space, search.bounds
    some = space.part(rows)
    columns = Columns(some, Microbatches(space, search.cache))
    again_s = some.forwards * columns.of(lambda g: g.recompute_s)
    is_fast = bounds.fitting_s[rows] - again_s < below_s
    rows, again_s, some = rows[is_fast], again_s[is_fast], space.part(rows[is_fast])
    none = replace(some, recompute=np.full_like(some.recompute, _NONE))
    columns = Columns(none, Microbatches(space, search.cache), for_memory=True)
    most = whole_peak_bytes(columns, search.usable_bytes)
    missing = np.maximum(0.0, most - search.usable_bytes)
    saved = np.maximum(most - bounds.peak_high_bytes[rows], 1.0)
    step_s = bounds.fitting_s[rows] - (1 - np.minimum(1.0, missing / saved)) * again_s
    yield from zip(rows.tolist(), step_s.tolist(), strict=True)


def _of_staged(search: Search, rows: Rows) -> Iterator[tuple[int, float]]:
    """Yield the rows with stages that were estimated, as bounds of others are far from the truth,
    and the seconds of their step without what is computed again."""
    for row in np.intersect1d(rows, search.estimated).tolist():
        candidate = search.candidate(row)
        if search.space.pp[row] > 1 and candidate is not None:
            yield row, candidate.estimate.step_s - candidate.estimate.time.recompute_s


def _with_fewest(plan: Plan, costs: CostModel, policy: Policy) -> Candidate | None:
    """Return `plan` with the fewest recomputed blocks with which it fits; None if it needs
    all, or none. Memory falls with every block more.
    """
    if plan.recompute is Recompute.NONE:
        return None
    fitting = None
    too_few, enough = 0, max(blocks_of_stages(plan, costs))
    while enough - too_few > 1:
        blocks = (too_few + enough) // 2
        variant = plan.model_copy(update={"recompute_blocks": blocks})
        candidate = next(iter(weigh([variant], costs, policy)), None)
        if candidate is not None and candidate.fits:
            fitting, enough = candidate, blocks
        else:
            too_few = blocks
    return fitting


def blocks_of_stages(plan: Plan, costs: CostModel) -> Iterator[int]:
    """Yield the number of blocks of each stage."""
    units = costs.facts.model.units
    ends = costs.stages.ends(plan) if plan.pp > 1 else (0, len(units))
    for first, last in pairwise(ends):
        yield sum(unit.is_block for unit in units[first:last])
