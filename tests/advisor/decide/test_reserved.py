"""Reserved memory of a plan: a step replayed in the caching allocator."""

from __future__ import annotations

import pytest

from advisor.decide.choose import choose
from advisor.decide.reserved import reserved_bytes
from advisor.inputs.facts import Facts
from engines.plan import PartialPlan
from profiles.closed_forms.transformer import TransformerShape, transformer_profile
from profiles.machine.clusters import cluster_from_name
from profiles.workload.stack import stack_named
from profiles.workload.workload import Workload

MODEL = transformer_profile(
    TransformerShape(
        kind="llama", layers=8, hidden=1024, heads=16, kv_heads=16, ffn=2816, vocab=32000,
        length=512, gated=True, tied=False, head_width=64,
    ),
    name="small",
)  # fmt: skip


def facts(devices: int) -> Facts:
    return Facts(
        model=MODEL,
        cluster=cluster_from_name(f"1x{devices}xA100-SXM-80GB"),
        workload=Workload(global_batch_size=8 * devices, precision="bf16"),
    )


@pytest.mark.parametrize("plan", [{"dp_replicate": 2}, {"dp_replicate": 2, "recompute": "full"}])
def test_reserved_memory_is_at_most_1_36_times_the_allocated(
    plan: dict[str, object],
) -> None:
    """The allocator reserves whole segments: at least the peak, and below 1.36 times the peak in
    published runs of steady shapes (the largest ratio of 352 replays of every allocation)."""
    decision = choose(facts(2), partial=PartialPlan.build({**plan, "microbatch_size": 8}))
    context = decision.estimate.memory.context
    allocated = decision.estimate.peak_bytes - context
    assert allocated <= reserved_bytes(decision) - context <= 1.36 * allocated


def test_programs_with_states_of_their_own_reserve_the_estimated_share() -> None:
    own = facts(2).model_copy(update={"stack": stack_named("megatron-core-0.12")})
    decision = choose(own, partial=PartialPlan(dp_replicate=2, microbatch_size=8))
    assert reserved_bytes(decision) == decision.estimate.reserved_bytes
