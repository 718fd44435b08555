"""Rungs of the ladder: which one a model is followed on, and that they count the same."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiles.capture import ladder
from profiles.capture.capture import capture
from profiles.capture.parameter_trace import trace_parameters
from profiles.capture.subject import TracedModel
from profiles.capture.trace_step import StepTrace, trace_step
from profiles.errors import ModelError
from profiles.model.profile import GLUE, ModelProfile, Numerics
from profiles.model.source import RANDOM, CaptureSource
from tests.engines import cases, value_paths
from tests.profiles.capture.measured import measure

AS_BUILT = Numerics.AS_BUILT
FAKE, KNOWN, RUN, PARAMETERS = CaptureSource
OF_A_RUN = ("asserted-finite", "logged-mean", "routed-with-capacity", "packed-lengths")
OF_THE_BATCH = (
    *("branch-on-a-mask", "loop-over-an-item", "early-exit", "boolean-index", "nonzero-rows"),
    *("one-argument-where", "ragged-list", "numpy-round-trip", "unique-ids", "merged-tokens"),
    *("repeated-by-counts", "counting-buffer", "ctc-alignment"),
)


def profile_of(name: str, rows: int = 4) -> ModelProfile:
    case = value_paths.CASES[name]
    torch.manual_seed(0)
    return capture(case.build(), case.batch(rows), loss_fn=case.loss_fn)


@pytest.mark.parametrize("name", OF_THE_BATCH)
def test_code_that_acts_on_the_batch_is_followed_on_fake_tensors(name: str) -> None:
    profile = profile_of(name)
    assert profile.source is KNOWN
    assert all("tests/engines/value_paths.py:" in read.line for read in profile.reads)
    assert profile.reads


@pytest.mark.parametrize("name", [*OF_THE_BATCH, *OF_A_RUN])
def test_flop_and_activations_on_the_path_of_the_sample_are_those_of_a_run(name: str) -> None:
    case, rows = value_paths.CASES[name], 4
    torch.manual_seed(0)
    model = case.build()
    profile = capture(model, case.batch(rows), loss_fn=case.loss_fn)
    measured = measure(model, case.batch(rows), case.loss_fn)
    seen = sum(unit.cost(AS_BUILT).activation_bytes.at(rows) for unit in profile.units)
    assert profile.flop(rows) == pytest.approx(measured.flop)
    assert seen == pytest.approx(measured.saved_bytes, rel=0.02)


@pytest.mark.parametrize("name", cases.CASES)
@pytest.mark.parametrize("source", [KNOWN, RUN])
def test_all_rungs_count_ordinary_models_alike(name: str, source: CaptureSource) -> None:
    case = cases.CASES[name]
    torch.manual_seed(0)
    subject = TracedModel(case.build(), case.batch(2), case.loss_fn)
    one, other = (trace_step(subject, AS_BUILT, source=s) for s in (FAKE, source))
    assert other.costs.keys() == one.costs.keys()
    assert other.flow == one.flow
    assert other.unused == one.unused
    assert flop(other) == flop(one)
    assert saved(other) == saved(one)
    assert other.peak_bytes == pytest.approx(one.peak_bytes, rel=0.01)


def flop(step: StepTrace) -> dict[str, tuple[int, int]]:
    return {name: (cost.forward_flop, cost.backward_flop) for name, cost in step.costs.items()}


def saved(step: StepTrace) -> dict[str, int]:
    return {name: cost.activation_bytes for name, cost in step.costs.items()}


@pytest.mark.parametrize("name", OF_A_RUN)
def test_code_that_acts_on_activations_is_followed_in_a_run(name: str) -> None:
    assert profile_of(name).source is RUN


def test_a_run_over_few_rows_stands_for_many() -> None:
    few, many = (profile_of("logged-mean", rows) for rows in (2, 64))
    assert many.samples == 64  # it is quick
    assert few.flop(64) == many.flop(64)


def test_a_model_too_slow_to_run_whole_is_run_over_few_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ladder._Limit, "allows", lambda *_, **__: False)
    assert profile_of("logged-mean", 64).samples == ladder.FEW_ROWS


@pytest.mark.parametrize("name", ["logged-mean", "branch-on-a-mask"])
def test_a_model_too_large_to_run_is_known_by_its_parameters(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its states are exact, and the guess at activations is within its range."""
    profile_of(name)  # torch's first call of some operators holds a byte until it is collected
    close = profile_of(name)
    monkeypatch.setattr(ladder, "MOST_OF_MEMORY", 0.0)
    profile = profile_of(name)
    if close.source is KNOWN:
        assert profile == close
        return
    assert profile.source is PARAMETERS
    assert (profile.parameter_bytes, profile.gradient_bytes) == (
        close.parameter_bytes,
        close.gradient_bytes,
    )
    assert profile.shard_units() == ()
    assert profile.reads


@pytest.mark.parametrize("name", cases.CASES)
def test_guessed_activations_are_within_their_range(name: str) -> None:
    from advisor.cost.load.loads import GUESS_ERROR

    case = cases.CASES[name]
    subject = TracedModel(case.build(), case.batch(2), case.loss_fn)
    guessed = sum(saved(trace_parameters(subject)).values())
    counted = sum(saved(trace_step(subject, AS_BUILT)).values())
    assert guessed * (1 + GUESS_ERROR) >= counted


def test_a_model_on_the_meta_device_can_be_run_with_random_parameters() -> None:
    case = value_paths.CASES["logged-mean"]
    with torch.device("meta"):
        model = case.build()
    profile = capture(model, case.batch(4), loss_fn=case.loss_fn)
    assert profile.source is RUN
    assert all(parameter.is_meta for parameter in model.parameters())


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return x
        return self.linear(x[:, :3])  # type: ignore[no-any-return]


def test_a_model_that_fails_in_a_plain_run_too_is_refused() -> None:
    with pytest.raises(ModelError, match=r"does not run on the sample: RuntimeError"):
        capture(Broken(), torch.randn(4, 16))


def test_a_run_leaves_the_model_as_it_was() -> None:
    case = value_paths.CASES["logged-mean"]
    model = case.build()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    capture(model, case.batch(4), loss_fn=case.loss_fn)
    assert not hasattr(model, "last")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("name", ["stochastic-depth", "layer-drop"])
def test_layers_that_are_dropped_at_random_are_noted(name: str) -> None:
    random.seed(0)
    profile = profile_of(name)
    assert [(read.unit, read.operation) for read in profile.reads] == [(GLUE, RANDOM)]
    assert profile.may_skip_units


class NeverDrops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        noise = random.random()
        for layer in self.layers:
            if torch.rand([]) >= 0.0:
                x = layer(x)
        return x * noise


class KeepsMost(nn.Module):
    """Layers are dropped by the largest numbers, where others drop them by the least."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand(()) < 0.9:
                x = x + layer(x)
        return x


def test_layers_that_large_numbers_drop_are_noted() -> None:
    profile = capture(nn.Sequential(KeepsMost(), nn.Linear(4, 4)), torch.randn(2, 4))
    assert [read.operation for read in profile.reads] == [RANDOM]
    assert profile.path_varies


def test_draws_that_decide_nothing_are_not_noted() -> None:
    assert capture(NeverDrops(), torch.randn(2, 4)).reads == ()


class Masked(nn.Module):
    """Numbers that are the same for every batch, and a loss that leaves tokens out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(torch.arange(3).max())):
            x = torch.tanh(self.linear(x))
        return x


def test_constants_are_read_without_a_note() -> None:
    profile = capture(Masked(), torch.randn(2, 4))
    assert (profile.source, profile.reads) == (KNOWN, ())


def test_a_loss_that_leaves_rows_out_acts_on_values_in_the_loss_alone() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output[target >= 0], target[target >= 0])

    batch = torch.randn(4, 4), torch.tensor([1, -100, 2, 0])
    profile = capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), batch, loss_fn=loss)
    assert profile.source is KNOWN
    assert {read.unit for read in profile.reads} == {"(loss)"}
    assert not profile.may_skip_units
