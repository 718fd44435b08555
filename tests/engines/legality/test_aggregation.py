"""Plans that may choose a gradient aggregation, and the refusals of others."""

from __future__ import annotations

import pytest

from engines.legality import problems
from engines.plan import Plan
from tests.engines.cases import cpu_ranks
from tests.engines.legality.test_legality import model, rules


@pytest.mark.parametrize(
    "words",
    [
        "aggregation=ring",
        "aggregation=hierarchical accumulation=4",
        "aggregation=tree compression=bf16",
        "compression=powersgd compression_rank=4 accumulation=2",
    ],
)
def test_ddp_may_choose_its_aggregation(words: str) -> None:
    assert rules(f"dp_replicate=4 {words}", model(), cpu_ranks(4, nodes=2)) == []


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("dp_shard=4 aggregation=ring", "data_parallel is full_shard"),
        ("dp_replicate=4 zero=1 compression=bf16", "data_parallel is zero1"),
        ("dp_replicate=2 tp=2 compression=bf16", "data_parallel is replicate, tp=2"),
        ("aggregation=tree", "data_parallel is none"),
    ],
)
def test_other_kinds_of_data_parallelism_may_not_choose_an_aggregation(
    plan: str, said: str
) -> None:
    parsed = Plan.parse(plan)
    cluster = cpu_ranks(parsed.world_size)
    results = [p for p in problems(parsed, model(), cluster) if p.rule == "aggregation-without-ddp"]
    assert len(results) == 1
    assert said in results[0].what
    assert "leave it out, or replicate" in results[0].hint


def test_one_node_has_no_hierarchy() -> None:
    plan = Plan.parse("dp_replicate=4 aggregation=hierarchical")
    (refusal,) = problems(plan, model(), cpu_ranks(4))
    assert "has 1 x 4 devices" in refusal.what
    (refusal,) = problems(plan, model(), cpu_ranks(4, nodes=4))
    assert "has 4 x 1 devices" in refusal.what


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("compression_rank=2", "rank-without-powersgd"),
        ("compression=powersgd aggregation=ring", "powersgd-own-sums"),
        ("zero=1 bucket_mib=50", "bucket-without-ddp"),
    ],
)
def test_incompatible_aggregation_settings_are_refused(words: str, rule: str) -> None:
    assert rules(f"dp_replicate=4 {words}", model(), cpu_ranks(4)) == [rule]


def test_gradients_must_be_dense_and_fp32() -> None:
    words = "dp_replicate=4 compression=bf16"
    sparse = model(sparse_gradients=("embed.weight",))
    assert rules(words, sparse, cpu_ranks(4)) == ["sparse-gradients"]
    short = "dp_replicate=4 precision=bf16 compression=bf16"
    assert "compression-dtype" in rules(short, model(dtype="bfloat16"), cpu_ranks(4))
