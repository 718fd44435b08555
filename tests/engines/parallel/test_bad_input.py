"""Batches and losses that cannot be trained on: named before any exchange, and survived."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.parallel import ParallelModel
from engines.runtime.world import join_world
from profiles.errors import AdvisorError, BatchError, InputError, ModelError
from tests.engines.cases import CASES, Case
from tests.engines.parity import alone, local_rows, spread
from tests.workers import Pool

BATCH = CASES["gpt"].batch(4)


class Switch:
    """A loss that goes wrong when it is told to."""

    def __init__(self) -> None:
        self.mode = "good"

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        reduction = "none" if self.mode == "vector" else "mean"
        output = output.detach() if self.mode == "detached" else output
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction=reduction)


def _after(wrong: Callable[[], object], parallel: ParallelModel, switch: Switch) -> AdvisorError:
    """The error of a wrong step; a good one goes on."""
    with pytest.raises(AdvisorError) as caught:
        wrong()
    switch.mode = "good"
    assert parallel.train_step(BATCH).isfinite()
    return caught.value


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("vector", r"the loss is (32,), it must be one number"),
        ("detached", "the loss has no gradient for any trained parameter"),
    ],
)
def test_a_loss_that_is_no_number_or_has_no_gradient_is_named(mode: str, said: str) -> None:
    switch = Switch()
    _, parallel = alone("gpt", loss_fn=switch)
    switch.mode = mode
    error = _after(lambda: parallel.train_step(BATCH), parallel, switch)
    assert isinstance(error, ModelError)
    assert error.what == said.replace("32", str(BATCH[1].numel()))  # type: ignore[index]


def test_leaves_of_different_sizes_are_named_with_both_sizes() -> None:
    _, parallel = alone("gpt")
    inputs, targets = BATCH  # type: ignore[misc]
    error = _after(lambda: parallel.train_step((inputs, targets[:3])), parallel, Switch())
    assert isinstance(error, BatchError)
    assert error.what == "first dimensions differ: element 0 has 4, element 1 has 3"


def test_no_row_is_borrowed_from_a_batch_that_failed() -> None:
    """Else a rank that is left without rows at the end of a pass would fail with it again."""
    _, parallel = alone("gpt")
    inputs, targets = BATCH  # type: ignore[misc]
    with pytest.raises(IndexError):
        parallel.train_step((inputs + 10**6, targets))
    with pytest.raises(BatchError, match="no earlier batch to borrow a row from"):
        parallel.train_step((inputs[:0], targets[:0]))
    parallel.train_step(BATCH)
    with pytest.raises(IndexError):
        parallel.train_step((inputs + 10**6, targets))
    assert parallel.train_step((inputs[:0], targets[:0])) == 0


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_step_with_gradients_off_is_refused(off: Callable[[], torch.no_grad]) -> None:
    _, parallel = alone("gpt")

    def step() -> None:
        with off():
            parallel.train_step(BATCH)

    error = _after(step, parallel, Switch())
    assert isinstance(error, InputError)
    assert error.what == "gradients are off where `train_step` was called: nothing could be learnt"


@pytest.mark.parametrize("norm", [-1.0, 0.0, math.nan, "1"])
def test_gradients_are_clipped_to_a_number_above_zero(norm: Any) -> None:
    """To a negative one they would change their sign, and the loss would grow."""
    with pytest.raises(InputError, match="`max_grad_norm` wants a number above 0, not"):
        alone("gpt", max_grad_norm=norm)
    _, parallel = alone("gpt")
    parallel.train_step(BATCH)
    with pytest.raises(InputError, match="`max_norm` wants a number above 0, not"):
        parallel.clip_grad_norm_(norm)


@pytest.mark.parametrize("seconds", [-1, 0, math.nan, math.inf, "60"])
def test_a_time_limit_is_a_time(seconds: Any) -> None:
    with pytest.raises(InputError, match="`timeout_s` wants a number above 0, 31,536,000 at most"):
        join_world(timeout_s=seconds)


@pytest.mark.parametrize("every", [-1, 1.5, "x"])
def test_replicas_are_compared_after_whole_steps(every: Any) -> None:
    with pytest.raises(InputError, match=f"compared every {every} steps"):
        alone("gpt", check_replicas_every=every)


@pytest.mark.parametrize("call", ["train_step", "forward"])
def test_parameters_without_values_are_named_at_the_first_step(call: str) -> None:
    _, parallel = alone("gpt")
    parallel.module.to("meta")
    with pytest.raises(ModelError, match="`position` is on the meta device: it has a shape"):
        parallel.train_step(BATCH) if call == "train_step" else parallel(BATCH[0])  # type: ignore[index]


class Stages(nn.Sequential):
    """Two stages of a pipeline."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Linear(8, 4))


def _detached_on_the_last_stage() -> str:
    switched = {"off": False}

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output.detach() if switched["off"] else output, target)

    case = Case(Stages, lambda rows: (torch.randn(rows, 8), torch.randn(rows, 4)), loss_fn)
    _, parallel = spread(case, "pp=2 schedule=gpipe microbatches=2 stages=1")
    batch = local_rows(parallel, case.batch(4), 4)
    assert parallel.eval_step(batch).isfinite()
    switched["off"] = True
    assert parallel.eval_step(batch).isfinite()
    with pytest.raises(AdvisorError) as caught:
        parallel.train_step(batch)
    return caught.value.what


@pytest.mark.dist
def test_the_last_stage_of_a_pipeline_names_a_loss_without_a_gradient(pool: Pool) -> None:
    said = "the loss has no gradient for any trained parameter"
    first, last = pool.run(_detached_on_the_last_stage, world_size=2)
    assert last == said
    assert said in first
