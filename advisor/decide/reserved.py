"""Reserved memory of the plan taken: its step is replayed in the caching allocator.

A search can only afford a constant share of the allocated memory; a replay
(`advisor.cost.estimates.rank_step`) takes 5 to 100 ms. On processors the heap of the C library
stands in its place.
"""

from __future__ import annotations

from advisor.cost import CostModel, Estimate
from advisor.cost.estimates.process_memory import process_memory
from advisor.cost.estimates.rank_step import can_replay, rank_step
from advisor.decide.decision import Decision
from engines.plan import Plan


def reserved_bytes(decision: Decision) -> float:
    """Return the device memory of the process for the plan of `decision`, context included."""
    return replayed_bytes(CostModel(decision.facts), decision.plan, decision.estimate)


def replayed_bytes(costs: CostModel, plan: Plan, estimate: Estimate) -> float:
    """Return the same of the fullest rank of any plan; the usual share if it cannot be replayed."""
    if not can_replay(costs, plan):
        return process_memory(costs, plan, estimate).nbytes
    rank = estimate.stages[0].rank if estimate.stages else 0
    context = estimate.memory.context
    return (estimate.peak_bytes - context) * rank_step(costs, plan, rank).replay().ratio + context
