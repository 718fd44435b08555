"""Chunked loss: taken where whole logits fit nothing, or cost time.

Chunks save memory, and no time by themselves. So a second search is made where nothing fits, or
where the plan taken pays for memory and whole logits are a good part of it; its plan is taken if it
is faster by more than a tie.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from advisor.cost import CostModel
from advisor.cost.memory.allocator import upper_end
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Objective, Policy
from advisor.inputs.stacks import is_of_engines
from advisor.search.columns import ROUNDING
from advisor.search.ranking import Candidate, beats, smallest_first
from advisor.search.search import Rows, Search
from engines.legality import problems
from engines.plan import Offload, PartialPlan, Plan, Recompute
from profiles.model.affine import Affine
from profiles.units import format_gib
from profiles.workload.losses import head_of

# Share of usable memory that whole logits take at least for a second search.
_WORTH_A_SEARCH = 0.05


def is_open(facts: Facts, partial: PartialPlan) -> bool:
    """Return True if a decision may take a chunked loss: it is a language model's, of our engines,
    and nobody said otherwise."""
    if partial.fixes("loss_chunks") or not is_of_engines(facts.stack):
        return False
    alone = Plan(loss_chunks=2)
    broken = (problem.rule for problem in problems(alone, facts.model, facts.cluster))
    is_possible = not any(rule.startswith("chunks-") for rule in broken)
    return facts.tokens_per_sample is not None and is_possible


def may_pay(winner: Candidate | None, costs: CostModel, policy: Policy) -> bool:
    """Return True if nothing fits, or if a plan with a chunked loss may beat the winner."""
    if winner is None:
        return True
    plan, device = winner.plan, costs.facts.cluster.device
    pays_for_memory = (
        plan.recompute is not Recompute.NONE
        or plan.offload is not Offload.NONE
        or plan.data_parallel.is_sharded
        or plan.forwards * plan.pp * plan.tp * plan.cp > 1
    )
    if not pays_for_memory and policy.objective is not Objective.MEMORY:
        return False
    if plan.microbatch_size is None:
        return False
    logits_bytes = _logits(plan, costs).at(plan.microbatch_size / (plan.tp * plan.cp))
    return logits_bytes > _WORTH_A_SEARCH * policy.usable_bytes(device)


def _logits(plan: Plan, costs: CostModel) -> Affine:
    """Bytes that the loss keeps and takes for a backward, of a rank's samples."""
    units = costs.facts.model.units
    if head_of(units) is None:
        return Affine()
    cost = units[-1].cost(costs.numerics(plan))
    return cost.activation_bytes + cost.backward_transient_bytes


def limit_s(winner: Candidate | None, policy: Policy) -> float:
    """Return the step that plans with a chunked loss must stay below to be taken."""
    if winner is None or policy.objective is Objective.MEMORY:
        return np.inf
    return winner.estimate.step_s / (1 + policy.simplicity_margin)


def promising(whole: Search, winner: Candidate, costs: CostModel, policy: Policy) -> Rows:
    """Rows of a search with whole logits that may beat `winner` with a chunked loss.

    Chunks cost time, and save at most the logits: a row is out whose lower bound of the step is not
    faster by more than a tie, or whose lower bound of the peak is too high by more than that.
    """
    space, bounds, device = whole.space, whole.bounds, costs.facts.cluster.device
    is_fast = bounds.step_s * (1 - ROUNDING) < limit_s(winner, policy)
    logits = _logits(winner.plan, costs)
    per_rank = space.microbatch_size / space.cp
    saved = logits.fixed + logits.per_sample * per_rank
    saved = upper_end(saved, device, doubtful=saved) - upper_end(0.0, device)

    def promise() -> Rows:
        may_fit = bounds.peak_high_bytes * (1 - ROUNDING) - saved <= whole.usable_bytes
        return np.flatnonzero(is_fast & may_fit)

    whole.refine(promise())
    return promise()


def is_better(chunked: Candidate, winner: Candidate | None, policy: Policy) -> bool:
    """Return True if the plan with a chunked loss is taken in place of `winner`."""
    if winner is None:
        return True
    if policy.objective is Objective.MEMORY:
        return smallest_first(chunked) < smallest_first(winner)
    return beats(chunked, winner, policy)


def reason(winner: Candidate, costs: CostModel) -> Iterator[str]:
    """Yield the memory that the winner's chunks save."""
    chunks = winner.plan.loss_chunks
    if chunks == 1:
        return
    whole = costs.estimate(winner.plan.model_copy(update={"loss_chunks": 1}))
    more = whole.peak_high_bytes - winner.estimate.peak_high_bytes
    yield (
        f"Head and loss are computed for 1/{chunks} of a microbatch's tokens at a time: with whole"
        f" logits this plan needs up to {format_gib(max(0.0, more))} more"
    )
