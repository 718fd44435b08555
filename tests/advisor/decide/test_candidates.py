"""Candidates: all legal, none missing, pinned settings unchanged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.decide.candidates import legal_plans, why_illegal
from advisor.decide.choose import choose
from engines.legality import problems
from engines.plan import Offload, PartialPlan
from profiles.closed_forms.families import profile_from_config
from profiles.errors import PlanError
from tests.factories import chain, cpus, facts, gpus, transformer


@given(nodes=st.integers(1, 4), devices=st.integers(1, 8), local=st.integers(1, 12))
def test_degrees_multiply_to_the_world_size_and_microbatches_to_the_batch(
    nodes: int, devices: int, local: int
) -> None:
    world = nodes * devices
    whole = facts(SMALL, gpus(nodes, devices), batch=world * local)
    plans = legal_plans(whole, PartialPlan())
    assert len(set(map(str, plans))) == len(plans) > 0
    for plan in plans:
        assert plan.world_size == world
        assert plan.global_batch_size == world * local
        assert problems(plan, whole.model, whole.cluster) == []


def test_every_kind_of_data_parallelism_is_there_with_degrees_that_respect_nodes() -> None:
    plans = legal_plans(facts(SMALL, gpus(2, 4), batch=8), PartialPlan.build({"recompute": "none"}))
    assert [str(plan) for plan in plans] == [
        "dp_replicate=8 microbatch_size=1 precision=bf16",
        "dp_replicate=8 zero=1 microbatch_size=1 precision=bf16",
        "dp_replicate=8 zero=2 microbatch_size=1 precision=bf16",
        "dp_shard=8 microbatch_size=1 precision=bf16",
        "dp_replicate=4 dp_shard=2 microbatch_size=1 precision=bf16",
        "dp_replicate=2 dp_shard=4 microbatch_size=1 precision=bf16",
    ]


def test_microbatches_are_the_divisors_of_the_local_batch() -> None:
    plans = legal_plans(facts(SMALL, gpus(1, 1), batch=6), PartialPlan.build({"recompute": "none"}))
    assert [(p.microbatch_size, p.accumulation) for p in plans] == [(6, 1), (3, 2), (2, 3), (1, 6)]


@pytest.mark.parametrize(
    "settings",
    [
        "dp_shard=4",
        "dp_replicate=2",
        "zero=2",
        "zero=3 recompute=full",
        "microbatch_size=2",
        "accumulation=2",
        "microbatches=2",
        "offload=states",
        "dp_shard=8 precision=fp32",
    ],
)
def test_pinned_settings_are_never_changed(settings: str) -> None:
    partial = PartialPlan.parse(settings)
    plans = legal_plans(facts(SMALL, gpus(1, 8), batch=32), partial)
    assert plans
    zero = {"zero2": 2, "full_shard": 3, "hybrid_shard": 3}
    for plan in plans:
        for key, value in partial.fixed.items():
            actual = zero.get(plan.data_parallel, 0) if key == "zero" else getattr(plan, key)
            assert actual == value


def test_offload_is_a_candidate_only_when_asked_for() -> None:
    whole = facts(SMALL, gpus(1, 1), batch=2)
    assert {p.offload for p in legal_plans(whole, PartialPlan())} == {Offload.NONE}
    offloaded = legal_plans(whole, PartialPlan(), offload=Offload.STATES)
    assert offloaded
    assert all(p.data_parallel.is_sharded for p in offloaded)


@pytest.mark.parametrize(
    ("settings", "batch", "words"),
    [
        ("", 10, "a global batch of 10 does not divide over 8 replicas: 10 % 8 = 2"),
        ("tp=2", 16, "tp=2 splits layers, and `tensor_styles` names none"),
        ("dp_shard=3", 16, "plan needs 3 ranks (dp_shard=3), 1x8xH100-like has 8"),
        ("microbatch_size=3", 16, "microbatch_size=3 does not divide the 2 samples"),
    ],
)
def test_settings_without_a_legal_plan_are_explained(settings: str, batch: int, words: str) -> None:
    violations = why_illegal(facts(SMALL, gpus(1, 8), batch=batch), PartialPlan.parse(settings))
    assert words in violations[0].what


def test_settings_that_the_models_own_code_rules_out_are_explained() -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes = {"num_key_value_heads": 4, "hidden_size": 64, "intermediate_size": 128}
    sizes["vocab_size"] = 100
    model = profile_from_config({**config, **sizes}, samples=1, sequence_length=16, name="llama")
    whole = facts(model, cpus(2), batch=4, precision="fp32")
    partial = PartialPlan.parse("tp=2 sequence_parallel=true recompute=none")
    assert legal_plans(whole, partial)  # by the profile alone
    with pytest.raises(PlanError, match="sequence_parallel=true, and no block") as refused:
        choose(whole, partial=partial, styles=lambda tp: (("head", "vocab"),))
    assert not any("recompute" in hint for hint in refused.value.hints)  # no other would do


def test_a_model_without_blocks_has_no_recompute() -> None:
    whole = facts(chain(blocks=False), cpus(2), batch=2, precision="fp32")
    assert {p.recompute.value for p in legal_plans(whole, PartialPlan())} == {"none"}


def test_a_thousand_devices_are_planned() -> None:
    decision = choose(facts(transformer(layers=126), gpus(128, 8), batch=8192))
    assert decision.plan.world_size == 1024
    assert decision.weighed > 100


SMALL = transformer(name="small", layers=2, hidden=64, ffn=128, vocab=100, tokens=16)
