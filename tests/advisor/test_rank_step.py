"""A rank's step in the simulated allocator, beside the moments that the cost model adds up."""

from __future__ import annotations

import pytest

from advisor import decide
from advisor.choose import choose
from advisor.cost import CostModel
from advisor.cost.memory import ALLOCATOR_SLACK
from advisor.cost.rank_step import can_replay, rank_step
from advisor.decision import Decision
from advisor.facts import Facts
from advisor.fragmentation import MOST_SLACK, fragments
from advisor.policy import Policy
from advisor.rules import Candidate, Finding
from profiles.clusters import cluster_from_name
from profiles.transformer import TransformerShape, transformer_profile
from profiles.workload import Workload

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


def chosen(pins: dict[str, object]) -> tuple[CostModel, Decision]:
    found = facts()
    return CostModel(found), choose(found, pins=pins)


@pytest.mark.parametrize("pins", PLANS, ids=str)
def test_the_replay_allocates_what_the_estimate_adds_up(pins: dict[str, object]) -> None:
    """Two accounts of one step: sums of what lives at each moment, and every tensor made and let go
    of. Blocks are a little larger than what is asked for."""
    costs, decision = chosen(pins)
    stages = decision.estimate.stages
    found = rank_step(costs, decision.plan, stages[0].rank if stages else 0).replay()
    allocated = decision.estimate.peak_bytes - decision.estimate.memory.context
    assert found.allocated_bytes == pytest.approx(allocated, rel=0.03)
    assert found.reserved_bytes <= (1 + MOST_SLACK) * found.allocated_bytes


def test_every_microbatch_in_flight_is_there() -> None:
    costs, decision = chosen({"pp": 4, "dp_replicate": 2, "microbatch_size": 1, "schedule": "1f1b"})
    first, last = (rank_step(costs, decision.plan, rank) for rank in (0, 3))
    # The first stage takes in as many microbatches as there are stages before its first backward.
    ahead = [each.is_forward for each in first.order].index(False)
    assert ahead == 4
    assert [each.is_forward for each in last.order].index(False) == 1


def with_room(decision: Decision, slack: float) -> tuple[CostModel, Candidate]:
    """The plan on a device that has `slack` of what may be allocated beside it."""
    device = decision.facts.cluster.device
    context = device.context_bytes.high
    allocated = (decision.estimate.peak_high_bytes - context) / (1 + ALLOCATOR_SLACK)
    room = (allocated * (1 + slack) + context) / Policy().usable_bytes(device)
    memory = device.memory_bytes.model_copy(update={"value": device.memory_bytes.value * room})
    own = decision.facts.cluster.model_copy(
        update={"device": device.model_copy(update={"memory_bytes": memory})}
    )
    found = decision.facts.model_copy(update={"cluster": own})
    return CostModel(found), Candidate(decision.plan, decision.estimate)


def test_a_plan_does_not_run_where_its_pieces_find_no_room() -> None:
    _, decision = chosen({"dp_shard": 8, "microbatch_size": 2})
    costs, candidate = with_room(decision, 0.0)
    finding = fragments(candidate, costs, Policy())
    assert finding is not None
    assert "pieces" in finding.because
    assert fragments(candidate, with_room(decision, MOST_SLACK)[0], Policy()) is None


def test_what_is_refused_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    free = choose(facts())

    def refuse(candidate: Candidate, costs: CostModel, policy: Policy) -> Finding | None:
        said = Finding(rule="fits-device", because="said so", missing_bytes=1.0)
        return said if candidate.plan == free.plan else None

    monkeypatch.setattr(decide, "fragments", refuse)
    assert choose(facts()).plan != free.plan


def test_processors_have_no_caching_allocator() -> None:
    found = facts()
    cpu = found.cluster.device.model_copy(update={"kind": "cpu"})
    on_cpu = found.model_copy(update={"cluster": found.cluster.model_copy(update={"device": cpu})})
    assert not can_replay(CostModel(on_cpu), choose(found, pins=PLANS[0]).plan)
