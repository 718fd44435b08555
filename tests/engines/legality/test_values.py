"""Plans that cut or split a model whose code acts on values name the line; others are legal."""

from __future__ import annotations

import pytest

from engines.legality import problems
from engines.plan import Plan
from profiles.model.flow import GLUE, LOSS
from profiles.model.profile import ModelProfile
from profiles.model.source import RANDOM, CaptureSource, ValueRead
from tests.engines.cases import cpu_ranks
from tests.engines.legality.test_legality import model

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
