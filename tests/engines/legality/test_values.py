"""Plans that cut or split a model whose code acts on values name the line; others are legal."""

from __future__ import annotations

import pytest

from engines.legality import problems
from engines.plan import Plan
from profiles.model.flow import GLUE, LOSS
from profiles.model.layers import LayerCost, LayerKind
from profiles.model.profile import ModelProfile, Numerics, UnitCost
from profiles.model.source import ATTRIBUTE, BACKWARD, RANDOM, CaptureSource, ValueRead
from tests.engines.cases import cpu_ranks
from tests.engines.legality.test_legality import model, unit

STAGES = "pp=2 schedule=gpipe stages=b.1 microbatches=2"
LAYERS = "tp=2 tensor_styles=b.*:column"


def reading(unit: str, operation: str = "item") -> ModelProfile:
    reads = (ValueRead(unit=unit, line="net.py:7", operation=operation),)
    return model().model_copy(update={"reads": reads})


def rules(plan: str, profile: ModelProfile) -> list[str]:
    broken = problems(Plan.parse(plan), profile, cpu_ranks(2))
    return [problem.rule for problem in broken if problem.rule.startswith("values")]


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2", "dp_replicate=2 zero=2"])
def test_replicas_and_shards_take_any_path(plan: str) -> None:
    assert rules(plan, reading(GLUE)) == []
    assert rules(plan, model().model_copy(update={"source": CaptureSource.PARAMETERS})) == []


def test_a_pipeline_names_the_line_that_acts_on_values() -> None:
    problem, *_ = problems(Plan.parse(STAGES), reading(GLUE), cpu_ranks(2))
    assert (
        problem.what == "net.py:7 (item) acts on values of tensors: pp=2 cuts stages from one path"
    )
    assert rules(STAGES, reading(LOSS)) == []  # the last stage runs the loss as it is


def test_draws_within_a_unit_leave_its_calls_as_they_are() -> None:
    assert rules(STAGES, reading("b.1", RANDOM)) == []
    assert rules(STAGES, reading(GLUE, RANDOM)) == ["values-in-pipeline"]


def test_where_parameters_alone_are_known_nothing_is_cut() -> None:
    unknown = model().model_copy(update={"source": CaptureSource.PARAMETERS})
    for plan in (STAGES, LAYERS):
        assert rules(plan, unknown) == ["values-unknown-path"]


def test_ranks_that_share_a_sequence_act_on_no_values_even_in_the_loss() -> None:
    reads = reading(LOSS).model_copy(update={"tokens_per_sample": 8})
    assert rules("cp=2", reads) == ["values-in-context"]
    assert rules("cp=2", reads.model_copy(update={"reads": ()})) == []
    drawn = reading("b.1", RANDOM).model_copy(update={"tokens_per_sample": 8})
    assert rules("cp=2", drawn) == []


@pytest.mark.parametrize(
    ("place", "broken"), [(GLUE, True), (LOSS, True), ("b.1", False)], ids=["glue", "loss", "unit"]
)
def test_gradients_across_units_are_taken_on_one_rank_alone(place: str, broken: bool) -> None:
    asked = reading(place, BACKWARD)
    assert rules(STAGES, asked) == ["values-in-pipeline"] * broken
    assert rules(LAYERS, asked) == ["values-in-split-layers"] * broken


@pytest.mark.parametrize(
    ("operation", "place", "broken"),
    [
        (RANDOM, "b.1", True),
        (ATTRIBUTE, "b.1", True),
        (RANDOM, GLUE, False),
        ("item", "b.1", False),
    ],
)
def test_draws_and_counters_of_a_block_would_differ_where_it_runs_again(
    operation: str, place: str, broken: bool
) -> None:
    again = rules("dp_replicate=2 recompute=full", reading(place, operation))
    assert again == ["values-in-recompute"] * broken
    assert rules("dp_replicate=2", reading(place, operation)) == []


def test_only_layers_of_the_unit_that_acts_on_values_stay_whole() -> None:
    blocks = []
    for name, path in (("b.0", "fc"), ("b.1", "out")):
        layer = LayerCost(path=path, kind=LayerKind.LINEAR, inputs=4, outputs=4, same_input=0)
        costs = {Numerics.AS_BUILT: UnitCost(layers=(layer,))}
        blocks.append(unit(name).model_copy(update={"costs": costs}))
    reads = (ValueRead(unit="b.1", line="net.py:7", operation="item"),)
    profile = model(*blocks, reads=reads)
    assert rules("tp=2 tensor_styles=b.0.fc:column", profile) == []
    assert rules("tp=2 tensor_styles=b.*.fc:column", profile) == []
    refused = Plan.parse("tp=2 tensor_styles=b.*.out:column")
    (problem,) = problems(refused, profile, cpu_ranks(2))
    assert problem.what.endswith("tp=2 would split `b.1.out`, in the same unit")
    assert rules("tp=2", profile) == ["values-in-split-layers"]
    assert rules("tp=2", model()) == []
