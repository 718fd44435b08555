"""Rules of mechanisms one by one: a plan that breaks each, beside the nearest that does not."""

from __future__ import annotations

import pytest

from engines.legality import problems
from engines.plan import Plan
from profiles.machine.cluster import ClusterProfile
from profiles.model.layers import LayerCost, LayerKind
from profiles.model.profile import LOSS, ModelProfile, Numerics, UnitCost, UnitProfile
from profiles.workload.optimizers import Indivisible
from tests.engines.cases import cpu_ranks
from tests.engines.legality.test_legality import gpus, model, unit


def cards(count: int, *, nodes: int = 1) -> ClusterProfile:
    return gpus(count, "float32", "bfloat16", nodes=nodes)


def refused(plan: str, profile: ModelProfile, cluster: ClusterProfile) -> tuple[list[str], str]:
    """Rules that are broken, with what the first says and hints."""
    broken = problems(Plan.parse(plan), profile, cluster)
    said = f"{broken[0].what}; {broken[0].hint}" if broken else ""
    return [problem.rule for problem in broken], said


@pytest.mark.parametrize(
    ("plan", "cluster", "rules"),
    [
        ("dp_replicate=2", cards(2), []),
        ("dp_replicate=2", cards(4, nodes=2), ["world-size"]),
        ("dp_replicate=4", cards(4, nodes=2), ["threads-across-nodes"]),
        ("dp_replicate=2", cpu_ranks(2), ["threads-processors"]),
        ("dp_replicate=2 compile=true", cards(2), ["threads-alone"]),
    ],
)
def test_threads_drive_the_accelerators_of_one_node(
    plan: str, cluster: ClusterProfile, rules: list[str]
) -> None:
    assert refused(f"data_parallel=threads {plan}", model(), cluster)[0] == rules


def test_threads_need_a_module_on_one_device() -> None:
    placed = model(devices=("cuda:0", "cuda:1"))
    rules, said = refused("data_parallel=threads dp_replicate=2", placed, cards(2))
    assert rules == ["threads-alone"]
    assert "the plan has parts on several devices" in said


TWO, MIXED = ("cuda:0", "cuda:1"), ("cpu", "cuda:0")


@pytest.mark.parametrize(
    ("plan", "devices", "rules", "words"),
    [
        ("dp_replicate=2", TWO, [], ""),
        ("dp_shard=2", TWO[:1], [], ""),
        ("dp_shard=2", TWO, ["by-hand-split-again"], "hand; data_parallel=full_shard would split"),
        ("cp=2", TWO, ["context-without-tokens", "by-hand-split-again"], ""),
        ("dp_replicate=2 updates=local sync_every=2", TWO, ["by-hand-updates"], "updates=local ex"),
        ("dp_replicate=2", MIXED, ["by-hand-device-types"], "dp_replicate=2 wants one type"),
        ("precision=bf16", MIXED, ["by-hand-device-types"], "autocast wants one type of device,"),
        ("precision=bf16", MIXED, ["by-hand-device-types"], "one type, or set precision=fp32"),
        ("precision=bf16", TWO, [], ""),
        ("dp_replicate=1", MIXED, [], ""),
    ],
)
def test_parts_that_were_placed_by_hand_stay_where_they_are(
    plan: str, devices: tuple[str, ...], rules: list[str], words: str
) -> None:
    cluster = cards(Plan.parse(plan).world_size)
    broken, said = refused(plan, model(devices=devices), cluster)
    assert broken == rules
    assert words in said


@pytest.mark.parametrize(
    ("plan", "counts", "rules", "words"),
    [
        ("dp_replicate=2 ep=2", (8,), [], ""),
        ("dp_replicate=2 dp_shard=2 ep=4", (8,), [], ""),
        ("dp_replicate=3 ep=2", (8,), ["experts-outside-data"], "3 ranks: 3 % 2 = 1"),
        ("dp_replicate=2 ep=2", (8, 5, 3), ["experts-uneven"], "3 experts cannot be sharded"),
        ("dp_replicate=2 ep=2", (), ["experts-none"], "no block of Net"),
        ("dp_replicate=2 ep=2 compile=true", (8,), ["experts-compiled"], ""),
        ("dp_shard=2 ep=2 offload=states", (8,), ["experts-offloaded"], "offload=states"),
    ],
)
def test_experts_are_split_evenly_over_ranks_of_the_data_axes(
    plan: str, counts: tuple[int, ...], rules: list[str], words: str
) -> None:
    blocks = [unit(f"b.{n}").model_copy(update={"experts": counts}) for n in range(2)]
    broken, said = refused(plan, model(*blocks), cpu_ranks(Plan.parse(plan).world_size))
    assert broken == rules
    assert words in said


@pytest.mark.parametrize(
    ("styles", "rule"),
    [
        ("tensor_styles=b.*:column", ""),
        ("", "tensor-without-styles"),
        ("tensor_styles=b.*:sideways", "tensor-style"),
        ("tensor_styles=b.*:column sequence_parallel=true", "sequence-parallel-without-blocks"),
        ("tensor_styles=b.*:sequence", "sequence-styles"),
        ("tensor_styles=b.*:sequence sequence_parallel=true", ""),
    ],
)
def test_split_layers_have_styles_that_exist(styles: str, rule: str) -> None:
    broken, _ = refused(f"tp=2 {styles}", model(), cpu_ranks(2))
    assert broken == ([rule] if rule else [])


def headed(kind: LayerKind = LayerKind.LINEAR, **facts: object) -> ModelProfile:
    """A model whose last unit before the loss is one layer."""
    head = LayerCost(path="", kind=kind, inputs=4, outputs=8, same_input=0, reaches_output=True)
    named = {"head": UnitCost(layers=(head,)), LOSS: UnitCost()}
    tail = [
        UnitProfile(name=name, kind="Linear", costs={Numerics.AS_BUILT: cost})
        for name, cost in named.items()
    ]
    return model(unit("b.0"), unit("b.1"), *tail, **facts)


@pytest.mark.parametrize(
    ("plan", "profile", "rules"),
    [
        ("dp_replicate=1", headed(), []),
        ("dp_replicate=1", model(), ["chunks-without-head"]),
        ("dp_replicate=1", headed(LayerKind.EMBEDDING), ["chunks-of-head"]),
        ("dp_replicate=1", headed(logits_read_by="metric"), ["chunks-of-read-logits"]),
        ("dp_replicate=1", headed(devices=TWO), ["chunks-by-hand"]),
        ("tp=2 tensor_styles=head:vocab", headed(), []),
        ("tp=2 tensor_styles=b.*:column", headed(), []),
        ("tp=2 tensor_styles=head:gather", headed(), ["chunks-of-gathered-logits"]),
    ],
)
def test_chunks_of_a_loss_need_a_linear_head_whose_logits_nothing_else_takes(
    plan: str, profile: ModelProfile, rules: list[str]
) -> None:
    cluster = cards(Plan.parse(plan).world_size)
    assert refused(f"{plan} loss_chunks=4", profile, cluster)[0] == rules
    assert refused(f"{plan} loss_chunks=1", profile, cluster)[0] == []


@pytest.mark.parametrize(
    ("plan", "split"),
    [
        ("dp_replicate=2", None),
        ("dp_shard=2", "data_parallel is full_shard"),
        ("tp=2 tensor_styles=b.*:column", "data_parallel is none, tp is 2"),
        ("dp_replicate=2 ep=2", "data_parallel is replicate, ep is 2"),
    ],
)
def test_an_optimizer_of_whole_matrices_steps_no_part_of_one(plan: str, split: str | None) -> None:
    blocks = [unit(f"b.{n}").model_copy(update={"experts": (8,)}) for n in range(2)]
    because = "Muon needs whole matrices"
    reasons = Indivisible(rows=because)
    broken = problems(Plan.parse(plan), model(*blocks), cpu_ranks(2), indivisible=reasons)
    assert [problem.what for problem in broken] == ([f"{because}; {split}"] if split else [])


@pytest.mark.parametrize(
    ("plan", "wanted"),
    [
        ("dp_replicate=2", []),
        ("dp_shard=2", []),
        ("tp=2 tensor_styles=b.*:column", ["it looks at rows; tp is 2"]),
        ("pp=2 schedule=gpipe microbatches=2 stages=b.1", ["it looks at all; pp is 2"]),
    ],
)
def test_an_optimizer_of_rows_steps_shards_and_one_of_all_parameters_no_stage(
    plan: str, wanted: list[str]
) -> None:
    blocks = model(*(unit(f"b.{n}") for n in range(2)))
    reasons = Indivisible(columns="it looks at rows", parameters="it looks at all")
    broken = problems(Plan.parse(plan), blocks, cpu_ranks(2), indivisible=reasons)
    assert [each.what for each in broken if each.rule.startswith("optimizer")] == wanted


@pytest.mark.parametrize(
    ("plan", "ranks", "rules"),
    [
        ("dp_replicate=2 cp=2 aggregation=ring", 4, ["aggregation-without-ddp"]),
        ("dp_replicate=2 sync_every=2", 2, ["updates-period"]),
        ("dp_replicate=2 dp_shard=3", 8, ["world-size"]),  # its groups have no nodes yet
    ],
)
def test_settings_of_other_plans_are_refused_alone(plan: str, ranks: int, rules: list[str]) -> None:
    tokens = model().model_copy(update={"tokens_per_sample": 8})
    assert refused(plan, tokens, cpu_ranks(ranks))[0] == rules
