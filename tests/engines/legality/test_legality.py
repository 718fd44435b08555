"""Every rule of legality, with a plan that breaks it and one that does not."""

from __future__ import annotations

import pytest

from engines.legality import numerics, problems, require_legal
from engines.plan import Plan
from profiles.errors import PlanError
from profiles.machine.cluster import ClusterProfile
from profiles.model.profile import ModelProfile, Numerics, UnitCost, UnitProfile
from profiles.provenance import Quantity, Source
from profiles.workload.optimizers import Indivisible
from tests.engines.cases import cpu_ranks


def unit(
    name: str, *, dtypes: tuple[str, ...] = ("float32",), is_block: bool = True
) -> UnitProfile:
    return UnitProfile(
        name=name,
        kind="Block",
        is_block=is_block,
        parameters=10,
        parameter_bytes=40,
        dtypes=dtypes,
        costs={Numerics.AS_BUILT: UnitCost()},
    )


def model(*units: UnitProfile, dtype: str = "float32", **facts: object) -> ModelProfile:
    parts = units or (unit("blocks.0"), unit("blocks.1"))
    return ModelProfile(name="Net", units=parts, dtype=dtype, samples=1, **facts)  # type: ignore[arg-type]


def gpus(count: int, *dtypes: str, nodes: int = 1) -> ClusterProfile:
    ranks = cpu_ranks(count, nodes=nodes)
    speed = Quantity(value=1e14, source=Source.DATASHEET)
    device = ranks.device.model_copy(
        update={"kind": "cuda", "name": "V100", "flop_per_s": dict.fromkeys(dtypes, speed)}
    )
    return ranks.model_copy(update={"device": device})


def rules(plan: str, profile: ModelProfile, cluster: ClusterProfile) -> list[str]:
    return [problem.rule for problem in problems(Plan.parse(plan), profile, cluster)]


@pytest.mark.parametrize(
    "plan",
    [
        "dp_replicate=4",
        "dp_replicate=4 zero=1",
        "dp_replicate=4 zero=2 recompute=full",
        "dp_shard=4 offload=states precision=bf16",
        "dp_replicate=2 dp_shard=2 recompute=selective accumulation=3",
    ],
)
def test_the_data_parallel_family_is_legal(plan: str) -> None:
    assert rules(plan, model(), cpu_ranks(4)) == []


def test_degrees_must_multiply_to_the_world() -> None:
    refusals = problems(Plan.parse("dp_replicate=2 dp_shard=2"), model(), cpu_ranks(8))
    assert [p.rule for p in refusals] == ["world-size"]
    assert "4 ranks (dp_replicate=2 x dp_shard=2)" in refusals[0].what
    assert "has 8" in refusals[0].what


def test_cp_needs_sequences_and_ep_needs_experts() -> None:
    assert rules("cp=4", model(), cpu_ranks(4)) == ["context-without-tokens"]
    assert rules("dp_replicate=4 ep=2", model(), cpu_ranks(4)) == ["experts-none"]


def test_stages_need_a_pipeline_and_styles_need_tensor_parallelism() -> None:
    assert rules("stages=blocks.1", model(), cpu_ranks(1)) == ["stages-without-pipeline"]
    assert rules("tensor_styles=a:row", model(), cpu_ranks(1)) == ["styles-without-tensor"]


def test_precision_must_be_what_the_model_was_built_in_or_16_bits_on_fp32() -> None:
    half = model(unit("b.0", dtypes=("bfloat16",)), dtype="bfloat16")
    assert rules("precision=bf16", half, cpu_ranks(1)) == []
    assert rules("precision=fp32", half, cpu_ranks(1)) == ["precision"]
    assert rules("precision=fp16", model(), cpu_ranks(1)) == []
    assert rules("precision=fp16", half, cpu_ranks(1)) == ["precision"]


def test_a_loss_scale_needs_steps_that_all_ranks_can_leave_out() -> None:
    for words, rule in (
        ("updates=local", "loss-scale-of-async-updates"),
        ("compression=powersgd", "loss-scale-of-powersgd"),
        ("compression=bf16", ""),
    ):
        broken = [rule] if rule else []
        assert rules(f"dp_replicate=2 precision=fp16 {words}", model(), cpu_ranks(2)) == broken
        assert rules(f"dp_replicate=2 precision=bf16 {words}", model(), cpu_ranks(2)) == []


def test_a_device_without_bf16_is_not_given_bf16() -> None:
    assert rules("precision=bf16", model(), gpus(1, "float32", "float16")) == ["precision-device"]
    assert rules("precision=bf16", model(), gpus(1, "float32", "bfloat16")) == []


def test_a_device_without_bf16_is_offered_its_own_dtype() -> None:
    old = gpus(1, "float32", "float16")
    (problem,) = problems(Plan.parse("precision=bf16"), model(), old)
    assert problem.hint == "set precision=fp16 or fp32"
    alone = gpus(1, "bfloat16")
    (problem,) = problems(Plan.parse("precision=fp32"), model(), alone)
    assert problem.hint == "set precision=bf16"
    (problem,) = problems(Plan.parse("precision=fp32"), model(), gpus(1, "float64"))
    assert problem.hint == "build the model in another dtype, or give the device a rate of float32"


def test_sharded_units_are_computed_in_bf16_if_they_train_one_dtype() -> None:
    mixed = model(unit("b.0", dtypes=("float32", "float64")), unit("b.1"))
    low = gpus(2, "float32", "bfloat16")
    assert rules("dp_shard=2 precision=bf16", mixed, low) == ["mixed-dtypes"]
    assert rules("dp_shard=2", mixed, low) == []
    assert rules("dp_replicate=2 precision=bf16", mixed, low) == []
    first = unit("b.0", dtypes=("float32", "float64"))
    adapted = model(first.model_copy(update={"trained_dtypes": ("float32",)}), unit("b.1"))
    assert rules("dp_shard=2 precision=bf16", adapted, low) == []


def test_units_of_different_dtypes_may_be_sharded_each_on_its_own() -> None:
    mixed = model(unit("b.0", dtypes=("bfloat16",)), unit("b.1"))
    assert rules("dp_shard=2", mixed, cpu_ranks(2)) == []
    assert rules("dp_replicate=2", mixed, cpu_ranks(2)) == []


def test_sparse_gradients_may_be_sharded() -> None:
    sparse = model(sparse_gradients=("embed.weight",))
    assert rules("dp_shard=2", sparse, cpu_ranks(2)) == []
    assert rules("dp_replicate=2", sparse, cpu_ranks(2)) == []


def test_batch_norm_under_sharded_bf16_is_refused_with_the_remedy() -> None:
    normed = model(batch_norms=("stem.1",))
    refusals = problems(Plan.parse("dp_shard=2 precision=bf16"), normed, cpu_ranks(2))
    assert [p.rule for p in refusals] == ["mixed-batch-norm"]
    assert "precision=fp32" in refusals[0].hint
    assert rules("dp_shard=2", normed, cpu_ranks(2)) == []
    assert rules("dp_replicate=2 precision=bf16", normed, cpu_ranks(2)) == []


def test_hybrid_shard_groups_do_not_straddle_nodes() -> None:
    two_nodes_of_six = cpu_ranks(12, nodes=2)
    assert rules("dp_replicate=3 dp_shard=4", model(), two_nodes_of_six) == ["hybrid-across-border"]
    assert rules("dp_replicate=4 dp_shard=3", model(), two_nodes_of_six) == []
    assert rules("dp_replicate=2 dp_shard=6", model(), two_nodes_of_six) == []


def test_offload_needs_shards() -> None:
    assert rules("dp_replicate=2 offload=states", model(), cpu_ranks(2)) == ["offload-unsharded"]
    assert rules("zero=3 offload=states", model(), cpu_ranks(1)) == []


@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        ("dp_replicate=2 zero=1 offload=optimizer", "offload-sharded"),
        ("dp_replicate=2 zero=1 offload=optimizer,activations", "offload-sharded"),
        ("dp_replicate=2 offload=states,activations", "offload-unsharded"),
        ("pp=2 stages=h.1 offload=activations", "offload-stages"),
        ("dp_replicate=2 updates=local sync_every=4 offload=optimizer", "offload-async-updates"),
        ("dp_replicate=2 recompute=full offload=activations", "offload-recomputed"),
        ("dp_replicate=2 compile=true offload=activations", "offload-compiled"),
        ("dp_replicate=2 offload_to=disk", "disk-without-offload"),
    ],
)
def test_impossible_offload_is_refused_with_a_hint(plan: str, rule: str) -> None:
    refusals = problems(Plan.parse(plan), model(), cpu_ranks(2))
    assert rule in [p.rule for p in refusals]
    assert all(p.hint for p in refusals)


def test_legal_offload_combinations() -> None:
    for plan in (
        "dp_replicate=2 offload=optimizer",
        "dp_replicate=2 offload=optimizer,activations offload_to=disk",
        "dp_shard=2 offload=states,activations",
        "dp_shard=2 offload=activations offload_to=disk",
        "dp_shard=2 offload=states offload_to=disk",
        "dp_replicate=2 zero=1 offload=states,activations offload_to=disk",
        "dp_replicate=2 recompute=full offload=optimizer",
    ):
        assert rules(plan, model(), cpu_ranks(2)) == []


def test_activation_offload_needs_blocks() -> None:
    flat = model(unit("lstm", is_block=False))
    assert rules("offload=activations", flat, cpu_ranks(1)) == ["offload-without-blocks"]


@pytest.mark.parametrize(
    ("plan", "broken"),
    [
        ("recompute=full recompute_blocks=2", []),
        ("recompute_blocks=2", ["blocks-without-recompute"]),
        ("recompute=selective recompute_blocks=100", ["recompute-more-blocks"]),
    ],
)
def test_recomputed_blocks_are_some_of_those_that_there_are(plan: str, broken: list[str]) -> None:
    assert rules(plan, model(), cpu_ranks(1)) == broken


def test_recompute_needs_blocks() -> None:
    flat = model(unit("lstm", is_block=False))
    assert rules("recompute=full", flat, cpu_ranks(1)) == ["recompute-without-blocks"]


def test_a_refusal_lists_every_problem_and_every_hint() -> None:
    with pytest.raises(PlanError) as caught:
        require_legal(Plan.parse("cp=2 offload=states"), model(), cpu_ranks(4))
    text = str(caught.value)
    assert "needs 2 ranks" in text
    assert "also: cp=2 shards the sequence dimension" in text
    assert text.count("hint:") == 3


def test_numerics_follow_the_plan_and_the_model() -> None:
    assert numerics(Plan.parse("dp_shard=2"), model()) is Numerics.AS_BUILT
    assert numerics(Plan.parse("dp_shard=2 precision=bf16"), model()) is Numerics.BF16
    assert numerics(Plan.parse("dp_replicate=2 precision=bf16"), model()) is Numerics.BF16_AUTOCAST
    built = model(unit("b.0", dtypes=("bfloat16",)), dtype="bfloat16")
    assert numerics(Plan.parse("dp_shard=2 precision=bf16"), built) is Numerics.AS_BUILT


def test_shard_groups_of_split_layers_reach_over_the_tp_axis_too() -> None:
    plan = Plan.parse("dp_replicate=2 dp_shard=2 tp=2 tensor_styles=b.*:column")
    assert rules(str(plan), model(), cpu_ranks(8, nodes=2)) == []  # 4 ranks a group, 4 a node
    assert rules(str(plan), model(), cpu_ranks(8, nodes=4)) == []  # a group is two nodes
    wide = Plan.parse("dp_replicate=2 dp_shard=3 tp=2 tensor_styles=b.*:column")
    (problem,) = problems(wide, model(), cpu_ranks(12, nodes=3))
    assert problem.rule == "hybrid-across-border"
    assert "dp_shard=3 x tp=2 straddles nodes of 4 devices: 4 % 6 = 4" in problem.what


def test_shard_groups_of_shared_sequences_reach_over_the_cp_axis_too() -> None:
    tokens = model().model_copy(update={"tokens_per_sample": 96})
    fits = "dp_replicate=2 dp_shard=2 cp=2"  # 4 ranks a group, 4 a node
    assert rules(fits, tokens, cpu_ranks(8, nodes=2)) == []
    wide = Plan.parse("dp_replicate=2 dp_shard=2 cp=3")
    (problem,) = problems(wide, tokens, cpu_ranks(12, nodes=3))
    assert problem.rule == "hybrid-across-border"


def test_an_optimizer_of_whole_matrices_cannot_step_split_layers() -> None:
    plan = Plan.parse("tp=2 tensor_styles=b.*:column")
    (problem,) = problems(
        plan, model(), cpu_ranks(2), indivisible=Indivisible(rows="Muon needs whole matrices")
    )
    assert problem.rule == "optimizer-whole"
    assert "tp is 2" in problem.what
