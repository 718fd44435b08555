"""No rank steps by a loss or a gradient that is not finite, and the error says where it began."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.parallel import ParallelModel
from profiles.capture.batch.call import Batch
from profiles.errors import NonFiniteError, PlanError, UnknownNameError
from tests.engines.cases import CASES
from tests.engines.parity import alone, local_rows, parallelize
from tests.workers import Pool

PIPELINE = "pp=2 schedule=1f1b microbatches=2 stages=layers.1"
ROWS = 8
BAD = 1
"""The rank, or for its replica the rank, that has a value which is not finite."""


def _images(parallel: ParallelModel, *, bad: bool) -> Batch:
    """This replica's rows; with nan in the last replica's first image where `bad`."""
    images, labels = CASES["resnet-group-norm"].batch(ROWS)  # type: ignore[misc]
    if bad:
        images[ROWS // parallel.data_world_size * (parallel.data_world_size - 1)] = math.nan
    return local_rows(parallel, (images, labels), ROWS)


def _error_of(parallel: ParallelModel, batch: Batch) -> str:
    try:
        parallel.train_step(batch)
    except NonFiniteError as error:
        return str(error)
    return "no error"


def _bits(parallel: ParallelModel) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in parallel.state_dict().items()}


def _bad_batch(plan: str, good: int = 1) -> tuple[str, bool, bool, float]:
    """After so many good steps: the error; if all parameters stayed, and no gradient was left; the
    loss of a step after."""
    _, _, parallel = parallelize("resnet-group-norm", plan)
    for _ in range(good):
        parallel.train_step(_images(parallel, bad=False))
    before = _bits(parallel)
    text = _error_of(parallel, _images(parallel, bad=True))
    after = _bits(parallel)
    stays = all(torch.equal(after[name], value) for name, value in before.items())
    is_clean = parallel.full_gradients() == {}
    return text, stays, is_clean, parallel.train_step(_images(parallel, bad=False)).item()


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2"])
def test_the_rank_the_step_and_the_element_of_a_bad_batch_are_named(pool: Pool, plan: str) -> None:
    for text, stays, is_clean, loss in pool.run(_bad_batch, plan, world_size=2, timeout_s=40):
        first, second, *_ = text.splitlines()
        assert first == f"step 2: the loss of rank {BAD} is nan"
        assert second == f"  rank {BAD}: the batch has a value that is not finite in `element 0`"
        assert "hint: no parameter was changed: they are those after step 1" in text
        assert stays
        assert is_clean
        assert math.isfinite(loss)


@pytest.mark.dist
def test_losses_that_are_summed_beside_the_backward_name_the_rank_too(pool: Pool) -> None:
    for text, stays, is_clean, loss in pool.run(
        _bad_batch, "dp_replicate=2 accumulation=2", 3, world_size=2, timeout_s=40
    ):
        assert text.splitlines()[0] == f"step 4: the loss of rank {BAD} is nan"
        assert stays
        assert is_clean
        assert math.isfinite(loss)


@pytest.mark.dist
def test_in_a_pipeline_the_rank_of_the_last_stage_is_named(pool: Pool) -> None:
    for text, stays, _, loss in pool.run(_bad_batch, PIPELINE, world_size=2, timeout_s=40):
        first, second, *_ = text.splitlines()
        assert first == "step 2: the loss of rank 1 is nan"
        assert second == "  ranks 0-1: the batch has a value that is not finite in `element 0`"
        assert stays
        assert math.isfinite(loss)


class _OverflowsBackwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return gradients[0] * math.inf


def _bad_module(plan: str, name: str, forwards: bool) -> list[str]:
    """Lines of the error where on one rank a module's output, or its gradient, overflows."""
    _, _, parallel = parallelize("gpt", plan)

    def overflow(module: nn.Module, args: object, output: Tensor) -> Tensor:
        return output / 0.0 if forwards else _OverflowsBackwards.apply(output)  # type: ignore[no-untyped-call, no-any-return]

    if dist.get_rank() == BAD:
        parallel.module.get_submodule(name).register_forward_hook(overflow)
    return _error_of(parallel, local_rows(parallel, CASES["gpt"].batch(ROWS), ROWS)).splitlines()


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2"])
def test_the_first_module_whose_output_is_not_finite_is_named(pool: Pool, plan: str) -> None:
    for lines in pool.run(_bad_module, plan, "blocks.1.mlp.1", True, world_size=2, timeout_s=40):
        assert lines[0] == f"step 1: the loss of rank {BAD} is nan"
        assert lines[1] == (
            f"  rank {BAD}: the first output that is not finite is that of `blocks.1.mlp.1`"
        )


@pytest.mark.dist
def test_where_losses_are_finite_the_gradient_that_the_backward_made_first_is_named(
    pool: Pool,
) -> None:
    plan, name = "dp_replicate=2", "blocks.1.mlp.2"
    for lines in pool.run(_bad_module, plan, name, False, world_size=2, timeout_s=40):
        assert lines[:2] == [
            "step 1: a gradient is not finite, every loss is",
            "  ranks 0-1: the backward's first gradient that is not finite is that of"
            " `blocks.1.mlp.2.bias`",
        ]


def _skipped(plan: str) -> tuple[bool, int, int, list[str], float]:
    """If a training with a bad batch in its middle ends as one without it, to the bit; steps and
    steps left out; warnings; the loss of the bad batch."""
    states = []
    for has_bad in (False, True):
        _, _, parallel = parallelize("resnet-batch-norm", plan, on_nonfinite="skip")
        parallel.train_step(_images(parallel, bad=False))
        if has_bad:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loss = parallel.train_step(_images(parallel, bad=True)).item()
        parallel.train_step(_images(parallel, bad=False))
        states.append(_bits(parallel))
    same = all(torch.equal(states[1][name], value) for name, value in states[0].items())
    texts = [str(each.message) for each in caught if each.category is RuntimeWarning]
    return same, parallel.step, parallel.skipped_steps, texts, loss


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2"])
def test_a_skipped_step_leaves_no_trace_on_any_rank(pool: Pool, plan: str) -> None:
    results = pool.run(_skipped, plan, world_size=2, timeout_s=60)
    for rank, (same, steps, skipped, texts, loss) in enumerate(results):
        assert same  # weights, momentum, and the statistics of batch norms
        assert (steps, skipped) == (3, 1)
        assert math.isnan(loss)
        said = [f"step 2 was left out: the loss of rank {BAD} is nan; 1 so far"]
        assert texts == (said if rank == 0 else [])


def _classic(reaction: str) -> tuple[str, bool]:
    """The error of a classic loop's second step, and if it changed a parameter."""
    case, _, parallel = parallelize("resnet-group-norm", "dp_shard=2", on_nonfinite=reaction)
    assert case.loss_fn is not None
    text, before = "no error", _bits(parallel)
    for bad in (False, True):
        images, labels = _images(parallel, bad=bad)  # type: ignore[misc]
        case.loss_fn(parallel(images), labels).backward()
        before = _bits(parallel)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                parallel.optimizer.step()
        except NonFiniteError as error:
            text = error.what
        parallel.optimizer.zero_grad()
    after = _bits(parallel)
    return text, any(not torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.dist
def test_a_classic_loop_is_guarded_too(pool: Pool) -> None:
    wanted = "step 2: a gradient is not finite, every loss is"
    assert pool.run(_classic, "stop", world_size=2) == [(wanted, False)] * 2
    assert pool.run(_classic, "skip", world_size=2) == [("no error", False)] * 2


def _save_of_nan(folder: str) -> tuple[str, list[str]]:
    _, _, parallel = parallelize("gpt", "dp_shard=2")
    if dist.get_rank() == BAD:
        with torch.no_grad():
            parameter: Any = parallel.module.get_submodule("blocks.0.out").weight
            parameter.to_local().view(-1)[3] = math.nan
    try:
        parallel.save(folder)
    except NonFiniteError as error:
        return error.what, sorted(path.name for path in Path(folder).glob("*"))
    return "no error", []


@pytest.mark.dist
def test_parameters_that_are_not_finite_are_not_saved(pool: Pool, tmp_path: Path) -> None:
    text = f"`blocks.0.out.weight` is not finite on rank {BAD}: it is not saved"
    assert pool.run(_save_of_nan, str(tmp_path), world_size=2) == [(text, [])] * 2


def test_one_process_is_guarded_as_many_are() -> None:
    _, parallel = alone("resnet-group-norm")
    assert _error_of(parallel, _images(parallel, bad=True)).startswith(
        "step 1: the loss of rank 0 is nan\n  rank 0: the batch has"
    )
    _, parallel = alone("resnet-group-norm", on_nonfinite="skip")
    with pytest.warns(RuntimeWarning, match="step 1 was left out: the loss of rank 0 is nan"):
        parallel.train_step(_images(parallel, bad=True))
    assert parallel.skipped_steps == 1
    _, parallel = alone("resnet-group-norm", on_nonfinite="ignore")
    assert math.isnan(parallel.train_step(_images(parallel, bad=True)).item())
    assert all(p.isnan().any() for p in parallel.parameters())


def test_a_loss_that_is_infinite_on_finite_outputs_is_the_losses_own() -> None:
    def divides(logits: Tensor, targets: Tensor) -> Tensor:
        return logits.square().mean() / 0.0

    _, parallel = alone("resnet-group-norm", loss_fn=divides)
    text = _error_of(parallel, _images(parallel, bad=False))
    assert text.startswith(
        "step 1: the loss of rank 0 is inf\n"
        "  rank 0: every output is finite, the loss of it is not\n"
    )


def _refused() -> str:
    try:
        parallelize("gpt", "dp_replicate=2 updates=local", on_nonfinite="skip")
    except PlanError as error:
        return error.what
    return "no error"


@pytest.mark.dist
def test_ranks_that_step_at_different_times_cannot_leave_one_out(pool: Pool) -> None:
    text = '`on_nonfinite="skip"` leaves a step out on all ranks; these step at different times'
    assert pool.run(_refused, world_size=2) == [text] * 2


def test_a_reaction_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean `stop`"):
        alone("gpt", on_nonfinite="stops")
