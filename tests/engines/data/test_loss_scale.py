"""fp16 on fp32 masters trains as one process under torch's autocast and GradScaler."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR

from engines.parallel import ParallelModel
from profiles.errors import NonFiniteError, PlanError
from tests.engines.cases import CASES, token_loss
from tests.engines.parity import alone, local_rows, relative, spread
from tests.nightly import nightly
from tests.workers import Pool

ROWS, STEPS, OVERFLOWING = 8, 6, 2
FAINT = 2.0**-14
"""Of the loss: most gradients of activations would be zero in fp16, whose least number is 2^-24."""
LR, CLIP = 0.05 / FAINT, 0.5 * FAINT
SCALER = {"init_scale": 2.0**16, "growth_interval": 2}


class Loss:
    """The token loss times a factor, which a test sets before each step."""

    factor = FAINT

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.factor * token_loss(logits, targets)


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9)


def schedule(optimizer: torch.optim.Optimizer) -> ExponentialLR:
    return ExponentialLR(optimizer, 0.7)


def factor_of(step: int, *, is_bad: bool = True) -> float:
    return FAINT * (1e12 if step == OVERFLOWING and is_bad else 1.0)


def by_torch(model: torch.nn.Module) -> tuple[list[float], dict[str, Any]]:
    """Losses of the steps, the scaler's state after them; `model` has been trained."""
    optimizer, loss_fn = sgd(list(model.parameters())), Loss()
    scheduler, scaler = schedule(optimizer), torch.amp.GradScaler("cpu", **SCALER)
    losses = []
    for step in range(STEPS):
        inputs, targets = CASES["gpt"].batch(ROWS + step)
        loss_fn.factor = factor_of(step)
        with torch.autocast("cpu", torch.float16):
            output = model(inputs)
        loss = loss_fn(output.float(), targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() >= before:
            scheduler.step()
    return losses, scaler.state_dict()


def started(plan: str, **options: Any) -> tuple[torch.nn.Module, ParallelModel, Loss]:
    loss_fn = Loss()
    case = replace(CASES["gpt"], loss_fn=loss_fn)
    options = {"optimizer": sgd, "scheduler": schedule, **options}
    reference, parallel = spread(case, f"{plan} precision=fp16", **options)
    first = torch.amp.GradScaler("cpu", **SCALER)
    first.scale(torch.zeros(()))  # its state is made with the first loss
    parallel.loss_scaler.load_state_dict(first.state_dict())
    return reference, parallel, loss_fn


def train(parallel: ParallelModel, loss_fn: Loss, steps: range) -> list[float]:
    """Losses; the last rank alone overflows, in one step."""
    losses, is_bad = [], dist.get_rank() == dist.get_world_size() - 1
    for step in steps:
        loss_fn.factor = factor_of(step, is_bad=is_bad)
        batch = CASES["gpt"].batch(ROWS + step)
        losses.append(parallel.train_step(local_rows(parallel, batch, ROWS + step)).item())
    return losses


def _trained(plan: str) -> tuple[float, float, int, dict[str, Any], dict[str, Any]]:
    """Largest errors of losses, and of parameters over what they moved by; steps left out; the
    scaler's state, here and by torch."""
    reference, parallel, loss_fn = started(plan, max_grad_norm=CLIP)
    before = copy.deepcopy(reference.state_dict())
    wanted, state = by_torch(reference)
    got = train(parallel, loss_fn, range(STEPS))
    pairs = [pair for n, pair in enumerate(zip(got, wanted, strict=True)) if n != OVERFLOWING]
    loss = max(abs(a - b) / b for a, b in pairs)
    after, there = parallel.state_dict(), reference.state_dict()
    error = max(relative(after[n] - was, there[n] - was) for n, was in before.items())
    return loss, error, parallel.skipped_steps, parallel.loss_scaler.state_dict(), state


SPLIT = "tensor_styles=blocks.*.mlp.0:column,blocks.*.mlp.2:row"
PIPELINE = "pp=2 microbatches=2 schedule=1f1b stages=blocks.1"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ("dp_replicate=2", 2),
        ("dp_shard=2", 2),
        (f"tp=2 {SPLIT}", 2),
        (PIPELINE, 2),
        *nightly(
            ("dp_replicate=2 zero=1 accumulation=2", 2),
            ("dp_replicate=2 zero=2 recompute=full", 2),
            ("dp_shard=2 offload=states", 2),
            ("dp_replicate=2 compression=bf16", 2),
            (f"dp_shard=2 tp=2 {SPLIT}", 4),
            (f"dp_replicate=2 zero=1 {PIPELINE}", 4),
            ("dp_replicate=2 loss_chunks=4", 2),
            ("cp=2", 2),
        ),
    ],
)
def test_fp16_trains_as_torch_s_scaler_in_one_process(pool: Pool, plan: str, ranks: int) -> None:
    for loss, error, skipped, state, wanted in pool.run(_trained, plan, world_size=ranks):
        # fp16 rounds by 2^-12; casts of whole layers (FSDP) and partial sums round elsewhere.
        assert loss < 1e-4
        assert error < 1e-2
        assert (skipped, state) == (1, wanted)


def _classic_loop() -> tuple[float, float, dict[str, Any], dict[str, Any]]:
    """The same in a loop of one's own, with gradients of two backwards; and a step without scale:
    the part of the gradients that is zero."""
    reference, parallel, loss_fn = started("dp_replicate=1")
    first = copy.deepcopy(reference.state_dict())
    _, state = by_torch(reference)
    for step in range(STEPS):
        inputs, targets = CASES["gpt"].batch(ROWS + step)
        loss_fn.factor = factor_of(step) / 2
        for _ in range(2):
            parallel.scale_loss(loss_fn(parallel(inputs), targets)).backward()
        parallel.clip_grad_norm_(CLIP)
        parallel.optimizer.step()
        parallel.optimizer.zero_grad()
    after, there = parallel.state_dict(), reference.state_dict()
    error = max(relative(after[n] - was, there[n] - was) for n, was in first.items())
    own = parallel.loss_scaler.state_dict()
    parallel.loss_scaler.scale = 1.0
    parallel.forward_backward(CASES["gpt"].batch(ROWS))
    gone = parallel.full_gradients()["blocks.0.mlp.0.weight"] == 0
    return error, gone.double().mean().item(), own, state


def test_a_loop_of_one_s_own_scales_its_loss() -> None:
    error, gone, state, wanted = _classic_loop()
    assert error < 1e-2
    assert gone > 0.5  # what the scale is for
    assert state == wanted


def test_a_loss_that_was_not_scaled_is_refused_before_the_step() -> None:
    _, parallel, loss_fn = started("dp_replicate=1")
    inputs, targets = CASES["gpt"].batch(ROWS)
    loss_fn(parallel(inputs), targets).backward()
    with pytest.raises(PlanError, match="a loss that was not scaled"):
        parallel.optimizer.step()
    _, plain = alone("gpt")
    loss = torch.ones(())
    assert plain.scale_loss(loss) is loss


def test_a_loss_that_is_not_finite_stops_and_so_do_gradients_that_no_scale_helps() -> None:
    _, parallel, loss_fn = started("dp_replicate=1", on_nonfinite="stop")
    loss_fn.factor = float("nan")
    with pytest.raises(NonFiniteError, match="step 1: the loss of rank 0 is nan"):
        parallel.train_step(CASES["gpt"].batch(ROWS))
    loss_fn.factor = 1e30
    for scale in (8.0, 4.0, 2.0):
        parallel.loss_scaler.scale = scale
        assert parallel.train_step(CASES["gpt"].batch(ROWS)).isnan()
    assert (parallel.loss_scaler.scale, parallel.skipped_steps, parallel.step) == (1.0, 3, 3)
    with pytest.raises(NonFiniteError, match="step 4: a gradient is not finite, every loss is"):
        parallel.train_step(CASES["gpt"].batch(ROWS))


def _moved(folder: str) -> tuple[list[dict[str, Any]], list[float]]:
    """The scaler's states and rates of a run, and of one under another plan that goes on."""
    _, first, loss_fn = started("dp_shard=2")
    train(first, loss_fn, range(OVERFLOWING + 2))
    first.save(folder)
    _, second, _ = started(PIPELINE)
    second.load(folder)
    rates = [each.optimizer.param_groups[0]["lr"] for each in (first, second)]
    return [each.loss_scaler.state_dict() for each in (first, second)], rates


@pytest.mark.dist
def test_the_scale_goes_on_under_another_plan(pool: Pool, tmp_path: Path) -> None:
    for states, rates in pool.run(_moved, str(tmp_path), world_size=2):
        assert states[0] == states[1]
        assert (states[0]["scale"], states[0]["_growth_tracker"]) == (2.0**16, 1)
        assert rates == pytest.approx([LR * 0.7**3] * 2)
