"""Reserved memory of the plan that was taken: its step replayed in the caching allocator.

A constant share of what is allocated is all that a search can afford; of the one plan that is shown
the step is replayed (`advisor.cost.rank_step`), 5 to 100 ms.
"""

from __future__ import annotations

from advisor.cost import CostModel, Estimate
from advisor.cost.rank_step import can_replay, rank_step
from advisor.decide.decision import Decision
from engines.plan import Plan


def reserved_bytes(decision: Decision) -> float:
    """What the process takes of its device for the plan of `decision`, context included."""
    return replayed_bytes(CostModel(decision.facts), decision.plan, decision.estimate)


def replayed_bytes(costs: CostModel, plan: Plan, estimate: Estimate) -> float:
    """The same of the fullest rank of any plan; by the usual share where it cannot be replayed."""
    if not can_replay(costs, plan):
        return estimate.reserved_bytes
    rank = estimate.stages[0].rank if estimate.stages else 0
    context = estimate.memory.context
    return (estimate.peak_bytes - context) * rank_step(costs, plan, rank).replay().ratio + context
