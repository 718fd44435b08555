"""The last word on whether the plan that is taken fits: its step replayed in the allocator.

A search allows every plan the same share for memory in pieces that are too small. Of the plan that
it takes, the step is run through a simulated allocator that has what the device has left.
"""

from __future__ import annotations

from advisor.cost import CostModel
from advisor.cost.memory import ALLOCATOR_SLACK
from advisor.cost.rank_step import can_replay, rank_step
from advisor.policy import Policy
from advisor.rules import Candidate, Finding
from profiles.caching_allocator import OutOfMemoryError
from profiles.model import ModelProfile
from profiles.units import format_gib

# The largest of 352 replays of every allocation of a model's step reserved 1.36 times as much, that
# of a network on images, whose tensors have many sizes; of transformers none above 1.12.
MOST_SLACK, MOST_SLACK_OF_TOKENS = 0.36, 0.15


def most_slack(model: ModelProfile) -> float:
    """What the allocator may hold at most beside what is allocated, as a fraction."""
    return MOST_SLACK_OF_TOKENS if model.tokens_per_sample else MOST_SLACK


def fragments(candidate: Candidate, costs: CostModel, policy: Policy) -> Finding | None:
    """Why a plan that fits with the usual share does not run: where its step is replayed, a request
    finds no piece that is large enough, cached ones given back."""
    plan, estimate, device = candidate.plan, candidate.estimate, costs.facts.cluster.device
    context, usable = device.context_bytes.high, policy.usable_bytes(device)
    allocated = (estimate.peak_high_bytes - context) / (1 + ALLOCATOR_SLACK)
    slack = most_slack(costs.facts.model)
    if not can_replay(costs, plan) or allocated * (1 + slack) + context <= usable:
        return None
    rank = estimate.stages[0].rank if estimate.stages else 0
    # The replay has the peak that is predicted; the room is what its upper end leaves.
    share = (estimate.peak_bytes - estimate.memory.context) / allocated
    limit = int((usable - context) * share)
    try:
        rank_step(costs, plan, rank).replay(limit_bytes=limit)
    except OutOfMemoryError:
        missing = allocated * (1 + slack) + context - usable
        return Finding(
            rule="fits-device",
            because=f"does not fit: {format_gib(estimate.peak_high_bytes)} of"
            f" {format_gib(usable)} usable are in pieces that are too small when its step is"
            " replayed in the allocator",
            missing_bytes=missing,
        )
    return None
