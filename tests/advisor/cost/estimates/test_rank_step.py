"""A rank's step in the simulated allocator, compared with the peak that the cost model adds up."""

from __future__ import annotations

import pytest

from advisor.cost import CostModel
from advisor.cost.estimates.rank_step import rank_step
from advisor.decide.choose import choose
from advisor.decide.decision import Decision
from advisor.inputs.facts import Facts
from engines.plan import PartialPlan
from profiles.closed_forms.transformer import TransformerShape, transformer_profile
from profiles.machine.clusters import cluster_from_name
from profiles.workload.workload import Workload

MODEL = transformer_profile(
    TransformerShape(
        kind="llama", layers=16, hidden=2048, heads=16, kv_heads=16, ffn=5632, vocab=32000,
        length=1024, gated=True, tied=False, head_width=128,
    ),
    name="medium",
)  # fmt: skip
PLANS = [
    {"dp_replicate": 8, "data_parallel": "replicate", "microbatch_size": 8},
    {"dp_replicate": 8, "data_parallel": "replicate", "microbatch_size": 2},
    {"dp_replicate": 8, "data_parallel": "zero1", "microbatch_size": 2},
    {"dp_shard": 8, "microbatch_size": 2},
    {"dp_shard": 8, "microbatch_size": 2, "recompute": "full"},
    {"dp_shard": 8, "microbatch_size": 2, "recompute": "selective"},
    {"dp_replicate": 8, "data_parallel": "zero2", "microbatch_size": 2},
    {"dp_shard": 4, "tp": 2, "microbatch_size": 4},
    {"pp": 4, "dp_replicate": 2, "microbatch_size": 1, "schedule": "1f1b"},
    {"pp": 4, "dp_shard": 2, "microbatch_size": 1, "schedule": "gpipe"},
    {"pp": 2, "dp_shard": 4, "microbatch_size": 1, "schedule": "interleaved"},
]


def facts() -> Facts:
    return Facts(
        model=MODEL,
        cluster=cluster_from_name("1x8xA100-SXM-80GB"),
        workload=Workload(global_batch_size=64, precision="bf16"),
    )


def chosen(settings: dict[str, object]) -> tuple[CostModel, Decision]:
    inputs = facts()
    return CostModel(inputs), choose(inputs, partial=PartialPlan.build(settings))


@pytest.mark.parametrize("settings", PLANS, ids=str)
def test_the_replay_allocates_the_estimated_peak(settings: dict[str, object]) -> None:
    """Compare two accounts of one step: the sum of live tensors at each moment, and a replay of
    every allocation. The allocator's blocks are a little larger than requested."""
    costs, decision = chosen(settings)
    stages = decision.estimate.stages
    replayed = rank_step(costs, decision.plan, stages[0].rank if stages else 0).replay()
    allocated = decision.estimate.peak_bytes - decision.estimate.memory.context
    assert replayed.allocated_bytes == pytest.approx(allocated, rel=0.03)
    assert replayed.reserved_bytes <= 1.36 * replayed.allocated_bytes


def test_the_first_stage_runs_as_many_forwards_ahead_as_there_are_stages() -> None:
    costs, decision = chosen({"pp": 4, "dp_replicate": 2, "microbatch_size": 1, "schedule": "1f1b"})
    first, last = (rank_step(costs, decision.plan, rank) for rank in (0, 3))
    # The first stage takes in as many microbatches as there are stages before its first backward.
    ahead = [each.is_forward for each in first.order].index(False)
    assert ahead == 4
    assert [each.is_forward for each in last.order].index(False) == 1
