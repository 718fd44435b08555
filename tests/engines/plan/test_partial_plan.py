"""The partial plan: what a user fixed, from text, mapping or a whole plan."""

from __future__ import annotations

import json

import pytest

from advisor.decide.choose import choose
from advisor.decide.decision import Decision
from engines.plan import DataParallel, PartialPlan, Plan, Recompute
from profiles.errors import InputError, UnknownNameError
from tests.factories import facts, gpus, transformer


def test_settings_of_a_partial_plan_are_those_of_a_plan() -> None:
    plan = Plan.model_fields.keys() - {"schema_version"}
    assert PartialPlan.model_fields.keys() == plan | {"zero"}
    default = Plan().as_partial().fixed
    for name, value in (default | {"schedule": "gpipe", "max_staleness": 1}).items():
        if name in plan:
            assert str(PartialPlan.build({name: value}).fixed[name]) == str(value)


def test_open_settings_are_none_and_fixed_ones_are_listed_in_plan_order() -> None:
    partial = PartialPlan.parse("recompute=full tp=2 stages=a,b")
    assert partial.fixed == {"tp": 2, "stages": ("a", "b"), "recompute": Recompute.FULL}
    assert str(partial) == "tp=2 stages=a,b recompute=full"
    assert partial.fixes("pp", "tp")
    assert not partial.fixes("pp", "dp_shard")
    assert not PartialPlan().fixes()


def test_settings_are_added_removed_and_picked_by_name() -> None:
    partial = PartialPlan.parse("pp=2 tp=4 servers=1 backup_workers=2")
    assert partial.fixing(pp=4, cp=2).model_ranks == 4 * 4 * 2
    assert partial.leaving("pp").fixed.keys() == {"tp", "servers", "backup_workers"}
    assert partial.only("tp", "zero").fixed == {"tp": 4}
    assert partial.extra_ranks == 3


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("tp=2", None),
        ("zero=3", (DataParallel.FULL_SHARD, DataParallel.HYBRID_SHARD)),
        ("zero=0", (DataParallel.NONE, DataParallel.REPLICATE)),
        ("data_parallel=zero2", (DataParallel.ZERO2,)),
    ],
)
def test_a_zero_stage_leaves_the_kinds_that_it_names(
    text: str, kinds: tuple[DataParallel, ...] | None
) -> None:
    assert PartialPlan.parse(text).kinds == kinds


def test_a_whole_plan_fixes_every_setting_and_is_built_from_them_again() -> None:
    plan = Plan.parse("pp=2 dp_replicate=2 schedule=1f1b stages=b microbatches=4 recompute=full")
    assert Plan.build(plan.as_partial().fixed) == plan


def test_a_mapping_is_checked_as_text_is() -> None:
    with pytest.raises(UnknownNameError, match="tpp"):
        PartialPlan.build({"tpp": 2})
    with pytest.raises(InputError, match="dp_shard"):
        PartialPlan.build({"dp_shard": 0})


def test_a_decision_keeps_it_in_its_file_and_reads_files_that_call_it_pins() -> None:
    whole = facts(transformer(layers=2, hidden=512, ffn=1024, tokens=256), gpus(1, 4), batch=8)
    decision = choose(whole, partial=PartialPlan.parse("dp_shard=2 tensor_styles=a:column"))
    data = json.loads(decision.to_json())
    assert data["partial"] == {"dp_shard": 2, "tensor_styles": {"a": "column"}}
    data["pins"] = {"dp_shard": 2, "tensor_styles": [["a", "column"]]}
    del data["partial"]
    assert Decision.from_json(json.dumps(data)).partial == decision.partial
