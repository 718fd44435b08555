"""The plan as a value: text and JSON round trips, inference of the kind, and clear refusals."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.plan import (
    Aggregation,
    Compression,
    DataParallel,
    Offload,
    PartialPlan,
    Plan,
    Precision,
    Recompute,
    Schedule,
    Updates,
    load_plan,
)
from profiles.errors import FileError, InputError, PlanError, UnknownNameError

degree = st.integers(1, 16)
name = st.from_regex(r"[a-z_]+(\.[a-z0-9_*]+)*", fullmatch=True)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan that is a plan: kinds with degrees that they allow, everything else free."""
    kind = draw(st.sampled_from(DataParallel))
    many = st.integers(2, 8)
    replicate, shard = {
        DataParallel.NONE: (st.just(1), st.just(1)),
        DataParallel.FULL_SHARD: (st.just(1), degree),
        DataParallel.HYBRID_SHARD: (many, many),
    }.get(kind, (degree, st.just(1)))
    return Plan(
        pp=draw(degree),
        tp=draw(degree),
        cp=draw(degree),
        ep=draw(degree),
        dp_replicate=draw(replicate),
        dp_shard=draw(shard),
        data_parallel=kind,
        microbatch_size=draw(st.none() | degree),
        microbatches=draw(degree),
        accumulation=draw(degree),
        recompute=draw(st.sampled_from(Recompute)),
        precision=draw(st.sampled_from(Precision)),
        offload=draw(st.sampled_from(Offload)),
        sync_batch_norm=draw(st.booleans()),
        compile=draw(st.booleans()),
        schedule=draw(st.none() | st.sampled_from(Schedule)),
        stages=tuple(draw(st.lists(name, max_size=3))),
        tensor_styles=tuple(
            draw(st.dictionaries(name, st.sampled_from(["column", "row"]), max_size=3)).items()
        ),
        sequence_parallel=draw(st.booleans()),
        loss_chunks=draw(st.integers(1, 16)),
        aggregation=draw(st.sampled_from(Aggregation)),
        compression=draw(st.sampled_from(Compression)),
        compression_rank=draw(degree),
        updates=draw(st.sampled_from(Updates)),
        sync_every=draw(degree),
        servers=draw(st.integers(0, 3)),
        backup_workers=draw(st.integers(0, 3)),
        max_staleness=draw(st.none() | st.integers(0, 3)),
    )


@given(plans())
def test_text_and_json_give_the_plan_back(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("text", "hashed"),
    [("dp_replicate=2", "f354a4ca00e8bf47"), ("dp_shard=4 microbatches=2", "e20589485f4767fa")],
)
def test_settings_that_came_later_change_no_hash_of_a_plan_without_them(
    text: str, hashed: str
) -> None:
    """As they were before there was a choice of aggregation."""
    assert Plan.parse(text).fingerprint == hashed


@given(plans(), plans())
def test_equal_plans_and_only_they_have_equal_fingerprints(one: Plan, other: Plan) -> None:
    assert (one.fingerprint == other.fingerprint) == (one == other)


@pytest.mark.parametrize(
    ("text", "kind", "world"),
    [
        ("dp_replicate=1", DataParallel.NONE, 1),
        ("dp_replicate=4", DataParallel.REPLICATE, 4),
        ("dp_replicate=4 zero=1", DataParallel.ZERO1, 4),
        ("dp_replicate=4 zero=2", DataParallel.ZERO2, 4),
        ("dp_shard=8", DataParallel.FULL_SHARD, 8),
        ("zero=3 dp_shard=8", DataParallel.FULL_SHARD, 8),
        ("zero=3 offload=states", DataParallel.FULL_SHARD, 1),
        ("dp_replicate=2 dp_shard=8", DataParallel.HYBRID_SHARD, 16),
        ("pp=2 tp=4 dp_replicate=2 zero=1", DataParallel.ZERO1, 16),
        ("data_parallel=threads dp_replicate=2", DataParallel.THREADS, 2),
    ],
)
def test_the_kind_follows_from_the_degrees(text: str, kind: DataParallel, world: int) -> None:
    plan = Plan.parse(text)
    assert plan.data_parallel is kind
    assert plan.world_size == world


def test_servers_and_backup_workers_are_ranks_besides_the_replicas() -> None:
    plan = Plan.parse("dp_replicate=4 servers=2 backup_workers=1 microbatch_size=3")
    assert (plan.world_size, plan.data_degree, plan.global_batch_size) == (7, 4, 12)
    assert not plan.updates_in_step
    assert Plan.parse("dp_replicate=4").updates_in_step
    assert not Plan.parse("dp_replicate=4 updates=local sync_every=8").updates_in_step


LATER = ("aggregation", "compression", "compression_rank", "updates", "sync_every", "servers",
         "backup_workers", "max_staleness", "offload_to", "bucket_mib",
         "sequence_parallel", "loss_chunks", "recompute_blocks")  # fmt: skip


def test_a_plan_that_leaves_newer_settings_alone_keeps_its_hash() -> None:
    """Files that were written before they came are still those plans."""
    plan = Plan.parse("dp_replicate=2 dp_shard=4 microbatches=2 recompute=full")
    before = {
        name: value for name, value in plan.model_dump(mode="json").items() if name not in LATER
    }
    text = json.dumps(before, sort_keys=True)
    assert plan.fingerprint == hashlib.sha256(text.encode()).hexdigest()[:16]
    assert Plan.from_json(json.dumps({**before, "hash": plan.fingerprint})) == plan
    assert plan.model_copy(update={"servers": 1}).fingerprint != plan.fingerprint


def test_the_text_names_only_what_is_not_a_default() -> None:
    assert str(Plan.parse("microbatches=2 dp_shard=4 pp=1")) == "dp_shard=4 microbatches=2"
    assert str(Plan()) == "dp_replicate=1"


def test_the_global_batch_is_microbatch_times_forwards_times_replicas() -> None:
    plan = Plan.parse("dp_replicate=2 dp_shard=4 microbatch_size=3 microbatches=5 accumulation=7")
    assert plan.forwards == 35
    assert plan.global_batch_size == 3 * 35 * 8
    assert Plan().global_batch_size is None


def test_a_partial_plan_holds_only_what_was_named() -> None:
    assert PartialPlan.parse("tp=2 recompute=full").fixed == {"tp": 2, "recompute": "full"}
    assert PartialPlan.parse("").fixed == {}


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("dp_shrad=4", UnknownNameError, "unknown plan setting `dp_shrad`"),
        ("recompute=ful", UnknownNameError, "unknown recompute `ful`"),
        ("zero=5", UnknownNameError, "unknown ZeRO stage `5`"),
        ("dp_shard=four", PlanError, "`dp_shard` wants a positive whole number, not `four`"),
        ("dp_shard=0", PlanError, "positive whole number"),
        ("dp_shard", PlanError, "`dp_shard` is not a setting"),
        ("tp=2 tp=4", PlanError, "`tp` is given twice"),
        ("zero=3 dp_replicate=4", PlanError, "shards over dp_shard"),
        ("zero=1 dp_shard=4", PlanError, "shard over dp_replicate"),
        ("zero=1 data_parallel=replicate", PlanError, "say the same thing"),
        ("data_parallel=none dp_replicate=2", PlanError, "one replica"),
        ("data_parallel=hybrid_shard dp_shard=2", PlanError, "shards and replicates"),
    ],
)
def test_a_bad_setting_is_named(text: str, error: type[InputError], words: str) -> None:
    with pytest.raises(error, match=words):
        Plan.parse(text)


def test_a_misspelt_key_names_the_near_miss() -> None:
    with pytest.raises(UnknownNameError) as caught:
        Plan.parse("dp_shrad=4")
    assert "did you mean `dp_shard`?" in str(caught.value)


def test_a_file_that_was_changed_by_hand_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    Plan.parse("dp_shard=4").save(path)
    path.write_text(path.read_text().replace('"dp_shard": 4', '"dp_shard": 8'))
    with pytest.raises(FileError, match="changed by hand"):
        load_plan(path)


def test_a_plan_is_read_from_its_own_file_or_from_a_decisions(tmp_path: Path) -> None:
    plan = Plan.parse("dp_replicate=2 zero=1")
    plan.save(tmp_path / "plan.json")
    decision = {"plan": json.loads(plan.to_json()), "reasons": []}
    (tmp_path / "decision.json").write_text(json.dumps(decision))
    assert load_plan(tmp_path / "plan.json") == load_plan(tmp_path / "decision.json") == plan


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("not json", "not JSON"),
        ("[1]", "a JSON object is wanted"),
        ('{"schema_version": 99}', "schema version 99 of Plan is not readable"),
        ('{"dp_shrad": 2}', "unknown key `dp_shrad`"),
        ('{"dp_shard": "many"}', "`dp_shard` = 'many'"),
    ],
)
def test_a_broken_plan_file_says_what_and_where(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(InputError, match=words) as caught:
        load_plan(path)
    assert "plan.json" in str(caught.value)


@pytest.mark.parametrize(("word", "ours"), [("tensor", "tp"), ("fsdp", "dp_shard")])
def test_names_of_other_tools_are_translated(word: str, ours: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        Plan.parse(f"{word}=2")
    assert f"`{word}` is called `{ours}` here" in str(caught.value)
    Plan.parse(f"{ours}=2")


def test_a_pattern_may_have_several_styles_in_a_file() -> None:
    plan = Plan(tp=2, tensor_styles=(("a", "column"), ("b", "row"), ("a", "joined")))
    styles = json.loads(plan.to_json())["tensor_styles"]
    assert styles == {"a": "column joined", "b": "row"}
    assert set(Plan.from_json(plan.to_json()).tensor_styles) == set(plan.tensor_styles)
