"""Pipelines that are refused before any work, and the messages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from engines.legality import problems
from engines.pipeline.recording import record
from engines.plan import Plan
from profiles.capture.capture import capture
from profiles.errors import ModelError
from tests.engines.cases import CASES, cpu_ranks, profile_of

GPT = profile_of(CASES["gpt"], CASES["gpt"].build())


@pytest.mark.parametrize(
    ("plan", "rule", "words"),
    [
        ("pp=2 schedule=gpipe stages=block.1", "stage-unknown", "`block.1` is not a unit"),
        ("pp=2 schedule=gpipe stages=embed", "stage-empty", "stage 0 would have nothing to do"),
        ("pp=3 schedule=gpipe stages=norm,blocks.1", "stage-order", "`blocks.1` is not after"),
        ("pp=3 schedule=gpipe stages=norm,norm", "stage-order", "`norm` is not after"),
        ("pp=2 schedule=gpipe", "stage-count", "pp=2 needs 1 borders, `stages` names 0"),
        ("pp=2 schedule=gpipe stages=blocks.0,norm", "stage-count", "one stage a rank"),
        ("pp=2 schedule=zbv microbatches=2 stages=blocks.0,norm", "stage-count", "3 borders"),
        ("pp=2 schedule=interleaved microbatches=2 stages=blocks.0,norm", "stage-count", "makes 3"),
        ("pp=8 schedule=gpipe", "stages-too-many", "needs 8 units, the model calls 6"),
        ("pp=2 stages=norm", "pipeline-without-schedule", "needs a schedule"),
        ("pp=2 schedule=1f1b stages=norm", "pipeline-microbatches", "microbatches=1, pp=2"),
        (
            "pp=2 schedule=interleaved microbatches=3 stages=blocks.0,blocks.1,norm",
            "pipeline-microbatches",
            "microbatches=3 is no multiple of pp=2",
        ),
        (
            "pp=2 schedule=zero_bubble microbatches=3 stages=norm",
            "pipeline-microbatches",
            "microbatches=3 is no multiple of pp=2",
        ),
        (
            "pp=2 schedule=zbv stages=blocks.0,blocks.1,norm",
            "pipeline-microbatches",
            "microbatches=1, pp=2",
        ),
    ],
)
def test_an_impossible_pipeline_is_refused_by_its_rule(plan: str, rule: str, words: str) -> None:
    parsed = Plan.parse(plan)
    refusals = problems(parsed, GPT, cpu_ranks(parsed.world_size))
    assert [problem.rule for problem in refusals] == [rule]
    assert words in refusals[0].what
    assert refusals[0].hint


@pytest.mark.parametrize(
    ("border", "hint"),
    [
        ("block.1", "did you mean blocks.1"),
        ("blocks", "it holds the units blocks.0, blocks.1, blocks.2: name one of them"),
        ("blocks.1.mlp.0", "it is a part of `blocks.1`, which runs as one piece"),
        ("loss", "units: embed, blocks.0"),
    ],
)
def test_an_unknown_stage_border_is_refused_with_the_valid_ones(border: str, hint: str) -> None:
    plan = Plan.parse(f"pp=2 schedule=gpipe stages={border}")
    (problem,) = problems(plan, GPT, cpu_ranks(2))
    assert problem.rule == "stage-unknown"
    assert hint in problem.hint


def test_a_pipeline_needs_a_loss() -> None:
    profile = capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.randn(2, 4),))
    refusals = problems(Plan.parse("pp=2 schedule=gpipe stages=1"), profile, cpu_ranks(2))
    assert [problem.rule for problem in refusals] == ["pipeline-without-loss"]


class Remembering(nn.Module):
    """The first unit leaves something in a list, and the loss takes it from there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Keeper(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.first.hidden.clear()
        y = self.second(self.first(x))
        return y.sum() + self.first.hidden[0].sum()


class Keeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden: list[Tensor] = []
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made = self.linear(x)
        self.hidden.append(made * 2)
        out: Tensor = made.relu()
        return out


def test_a_border_between_a_hidden_value_and_its_use_is_refused() -> None:
    profile = capture(Remembering(), (torch.randn(2, 4),))
    refusals = problems(Plan.parse("pp=2 schedule=gpipe stages=second"), profile, cpu_ranks(2))
    assert [problem.rule for problem in refusals] == ["stage-hidden-value"]
    assert "`(loss)` takes something that `first` made and does not return" in refusals[0].what


class Shrinking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.mul_(0.9)
        return self.second(self.first(x)).sum()


def test_a_forward_that_changes_its_own_parameters_is_refused_when_it_is_recorded() -> None:
    model, batch = Shrinking(), (torch.randn(2, 4),)
    before = model.first.weight.clone()
    with pytest.raises(ModelError, match=r"changes its own parameter `first\.weight`"):
        record(model, capture(model, batch).flow, batch, has_target=False)
    assert torch.equal(model.first.weight, before)


@pytest.mark.parametrize(
    ("plan", "because"),
    [
        ("pp=2 schedule=gpipe stages=second", "other stages have copies of it or none"),
        ("dp_shard=2", ""),
        ("dp_shard=2 precision=bf16", "precision=bf16 computes in a copy of it"),
        ("dp_replicate=2 zero=1", ""),
        ("dp_replicate=2", ""),
    ],
)
def test_a_forward_that_changes_its_own_parameters_is_refused_before_any_work(
    plan: str, because: str
) -> None:
    profile = capture(Shrinking(), (torch.randn(2, 4),))
    assert profile.flow.written == ("first.weight",)
    refusals = problems(Plan.parse(plan), profile, cpu_ranks(2))
    refusals = [problem for problem in refusals if problem.rule != "precision-device"]
    assert [problem.rule for problem in refusals] == ["changed-parameters"] * bool(because)
    for problem in refusals:
        assert problem.what.endswith(f"its own parameter `first.weight`: {because}")


def test_buffers_and_activations_may_be_changed() -> None:
    case = CASES["resnet-batch-norm"]
    assert profile_of(case, case.build()).flow.written == ()


def test_a_forward_that_takes_another_path_than_the_sample_is_refused() -> None:
    class Deeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return (self.second(y) if len(x) < 3 else y).sum()

    model = Deeper()
    flow = capture(model, (torch.randn(1, 4),)).flow
    with pytest.raises(ModelError, match="makes 1 calls of its units") as caught:
        record(model, flow, (torch.randn(4, 4),), has_target=False)
    assert "call 1 is `the end`, it was `second`" in str(caught.value)
