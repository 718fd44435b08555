"""A rank's step in the simulated allocator, beside the moments that the cost model adds up."""

from __future__ import annotations

import pytest

from advisor.cost import CostModel
from advisor.cost.rank_step import rank_step
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
    found = facts()
    return CostModel(found), choose(found, partial=PartialPlan.build(settings))


@pytest.mark.parametrize("settings", PLANS, ids=str)
def test_the_replay_allocates_what_the_estimate_adds_up(settings: dict[str, object]) -> None:
    """Two accounts of one step: sums of what lives at each moment, and every tensor made and let go
    of. Blocks are a little larger than what is asked for."""
    costs, decision = chosen(settings)
    stages = decision.estimate.stages
    found = rank_step(costs, decision.plan, stages[0].rank if stages else 0).replay()
    allocated = decision.estimate.peak_bytes - decision.estimate.memory.context
    assert found.allocated_bytes == pytest.approx(allocated, rel=0.03)
    assert found.reserved_bytes <= 1.36 * found.allocated_bytes


def test_every_microbatch_in_flight_is_there() -> None:
    costs, decision = chosen({"pp": 4, "dp_replicate": 2, "microbatch_size": 1, "schedule": "1f1b"})
    first, last = (rank_step(costs, decision.plan, rank) for rank in (0, 3))
    # The first stage takes in as many microbatches as there are stages before its first backward.
    ahead = [each.is_forward for each in first.order].index(False)
    assert ahead == 4
    assert [each.is_forward for each in last.order].index(False) == 1
