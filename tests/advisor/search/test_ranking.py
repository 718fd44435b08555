"""Order of plans by simplicity, and their names."""

from __future__ import annotations

from itertools import pairwise

import pytest

from advisor.decide.comparison import cuts, kind, kind_words, shape, short_cuts, title
from advisor.search.ranking import simplicity
from engines.plan import Plan

# Simpler plans first, one step of SIMPLER_FIRST after the other.
FROM_SIMPLE = (
    "dp_replicate=8 microbatch_size=8",
    "dp_replicate=8 microbatch_size=1 accumulation=8",
    "dp_replicate=8 microbatch_size=8 recompute=selective",
    "dp_replicate=8 zero=1 microbatch_size=8",
    "dp_replicate=8 zero=2 microbatch_size=8",
    "dp_shard=8 microbatch_size=8",
    "dp_replicate=2 dp_shard=4 microbatch_size=8",
    "tp=2 dp_replicate=4 microbatch_size=8",
    "tp=2 dp_shard=4 microbatch_size=8",
    "tp=4 dp_replicate=2 microbatch_size=8",
    "tp=4 dp_replicate=2 microbatch_size=8 recompute=full",
    "pp=2 dp_replicate=4 schedule=gpipe stages=b microbatch_size=1 microbatches=8",
    "pp=2 dp_replicate=4 schedule=1f1b stages=b microbatch_size=1 microbatches=8",
    "pp=2 dp_replicate=4 schedule=1f1b stages=b microbatch_size=1 microbatches=16",
    "pp=2 dp_replicate=4 schedule=interleaved stages=b,c,d microbatch_size=1 microbatches=8",
    "pp=2 dp_replicate=4 schedule=interleaved stages=b,c,d,e,f microbatch_size=1 microbatches=8",
    "pp=2 dp_replicate=4 schedule=zero_bubble stages=b microbatch_size=1 microbatches=8",
    "pp=2 dp_replicate=4 schedule=zbv stages=b,c,d microbatch_size=1 microbatches=8",
    "pp=2 dp_shard=4 schedule=gpipe stages=b microbatch_size=1 microbatches=8",
    "pp=4 dp_replicate=2 schedule=gpipe stages=b,c,d microbatch_size=1 microbatches=8",
    "pp=8 schedule=gpipe stages=b,c,d,e,f,g,h microbatch_size=1 microbatches=8",
    "pp=2 tp=2 dp_replicate=2 schedule=gpipe stages=b microbatch_size=1 microbatches=8",
    "dp_shard=8 microbatch_size=8 offload=states",
)


@pytest.mark.parametrize(("simpler", "other"), list(pairwise(FROM_SIMPLE)))
def test_each_plan_is_simpler_than_the_next(simpler: str, other: str) -> None:
    assert simplicity(Plan.parse(simpler)) < simplicity(Plan.parse(other))


@pytest.mark.parametrize(
    ("spelt", "called"),
    [
        ("dp_replicate=1", "one device"),
        ("dp_replicate=8", "DDP over 8"),
        ("pp=4", "PP over 4"),
        ("tp=8 dp_shard=2", "TP over 8 + FSDP over 2"),
        ("pp=4 tp=8 dp_replicate=2 zero=1", "PP over 4 + TP over 8 + ZeRO-1 over 2"),
        ("tp=2 dp_replicate=2 dp_shard=4", "TP over 2 + HSDP, shard 4 x replicate 2"),
        ("dp_shard=8 offload=states", "FSDP over 8, CPU offload"),
        ("zero=3 offload=states", "FSDP, CPU offload"),
    ],
)
def test_a_plan_is_called_by_its_axes(spelt: str, called: str) -> None:
    assert title(Plan.parse(spelt)) == called


@pytest.mark.parametrize(
    ("spelt", "called"),
    [
        ("pp=4 tp=8 dp_replicate=2 zero=1", "PP + TP + ZeRO-1"),
        ("tp=8", "TP"),
        ("dp_replicate=2 dp_shard=4", "HSDP"),
        ("dp_shard=4 offload=states", "FSDP, CPU offload"),
        ("dp_replicate=1", "one device"),
    ],
)
def test_a_kind_has_no_degrees(spelt: str, called: str) -> None:
    assert kind_words(Plan.parse(spelt)) == called


def test_microbatches_of_a_pipeline_are_named_with_their_schedule() -> None:
    plan = Plan.parse(
        "pp=2 schedule=interleaved stages=b,c,d microbatch_size=2 microbatches=8 accumulation=3"
        " recompute=full precision=bf16"
    )
    assert cuts(plan) == (
        "microbatch 2 x 8 in interleaved 1F1B with 2 stages a device x 3 accumulation,"
        " full recompute, bf16"
    )
    assert short_cuts(plan) == "mb 2 x 24, interleaved 1F1B, full recompute"
    some = plan.model_copy(update={"recompute_blocks": 3})
    assert short_cuts(some) == "mb 2 x 24, interleaved 1F1B, full recompute of 3 blocks a stage"


def test_kind_and_shape_differ_by_degrees_and_nothing_else() -> None:
    one = Plan.parse("tp=2 dp_shard=4 microbatch_size=1")
    other = Plan.parse("tp=4 dp_shard=2 microbatch_size=2 recompute=full")
    assert kind(one) == kind(other)
    assert shape(one) != shape(other)
    recut = one.model_copy(update={"microbatch_size": 4})
    assert shape(one) == shape(recut)
