"""An exception in the user's code ends a step; the next one starts clean."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from engines.plan import Plan
from profiles.errors import ModelError
from tests.engines.cases import CASES, Case
from tests.engines.parity import (
    HSDP,
    KINDS,
    gradient_error,
    local_rows,
    parallelize,
    reference_loss,
    spread,
)
from tests.workers import Pool


class Interrupted(Exception):
    """An error of the user's code."""


class Fuse:
    """Blows at its `at`-th use once it is armed."""

    def __init__(self) -> None:
        self.left = 0

    def arm(self, *, at: int) -> None:
        self.left = at

    def use(self) -> None:
        if self.left:
            self.left -= 1
            if self.left == 0:
                raise Interrupted


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, value: Tensor, fuse: Fuse) -> Tensor:
        ctx.fuse = fuse  # type: ignore[attr-defined]
        return value.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.fuse.use()  # type: ignore[attr-defined]
        return gradients[0], None


def _after_an_exception(plan: str, where: str) -> list[float]:
    """Gradient errors of the steps after one whose second microbatch failed on every rank."""
    fuse, case = Fuse(), CASES["gpt"]
    assert case.loss_fn is not None

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if where == "loss":
            fuse.use()
        assert case.loss_fn is not None
        return case.loss_fn(output, target)

    reference, parallel = spread(Case(case.build, case.batch, loss_fn), f"{plan} accumulation=2")
    middle = parallel.module.get_submodule("blocks.1")
    if where == "forward":
        middle.register_forward_pre_hook(lambda *_: fuse.use())
    if where == "backward":
        middle.register_forward_hook(lambda _, __, x: _FailsInBackward.apply(x, fuse))

    batch = case.batch(8)
    part = local_rows(parallel, batch, 8)
    fuse.arm(at=2)
    with pytest.raises(Interrupted):
        parallel.train_step(part)
    reference_loss(reference, case, batch).backward()
    parallel.forward_backward(part)
    errors = [gradient_error(parallel, reference)]

    parallel.optimizer.zero_grad()
    fuse.arm(at=2)
    with pytest.raises(Interrupted):
        parallel.train_step(part)
    case.loss_fn(parallel(part[0]), part[1]).backward()  # type: ignore[index]
    errors.append(gradient_error(parallel, reference))  # a classic loop goes on as well
    return errors


BREAKS = [
    (plan, where)
    for plan in (*KINDS, HSDP)
    for where in ("forward", "loss", "backward")
    if (plan, where) != ("dp_replicate=2", "backward")  # DDP refuses to go on: see below
]


@pytest.mark.dist
@pytest.mark.parametrize(("plan", "where"), BREAKS)
def test_a_failed_step_does_not_change_the_next_one(pool: Pool, plan: str, where: str) -> None:
    results = pool.run(_after_an_exception, plan, where, world_size=Plan.parse(plan).world_size)
    for errors in results:
        assert max(errors) < 1e-5


def _ddp_after_a_failed_backward() -> str:
    fuse = Fuse()
    case, _, parallel = parallelize("gpt", "dp_replicate=2")
    middle = parallel.module.get_submodule("blocks.1")
    middle.register_forward_hook(lambda _, __, x: _FailsInBackward.apply(x, fuse))
    part = local_rows(parallel, case.batch(8), 8)
    fuse.arm(at=1)
    with pytest.raises(Interrupted):
        parallel.train_step(part)
    with pytest.raises(ModelError) as caught:
        parallel.train_step(part)
    return str(caught.value)


@pytest.mark.dist
def test_ddp_refuses_to_continue_after_a_failed_backward(pool: Pool) -> None:
    for text in pool.run(_ddp_after_a_failed_backward, world_size=2):
        assert "the backward before this forward did not reach every parameter" in text
        assert "build the model anew" in text


def _failed_evaluation(plan: str) -> float:
    fuse, case = Fuse(), CASES["gpt"]
    reference, parallel = spread(case, plan)
    parallel.module.get_submodule("blocks.1").register_forward_pre_hook(lambda *_: fuse.use())
    batch = case.batch(8)
    part = local_rows(parallel, batch, 8)
    fuse.arm(at=1)
    with pytest.raises(Interrupted):
        parallel.eval_step(part)
    _halve(parallel)
    _halve(reference)
    parallel.forward_backward(part)
    reference_loss(reference, case, batch).backward()
    return gradient_error(parallel, reference)


@torch.no_grad()
def _halve(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.5)


@pytest.mark.dist
@pytest.mark.parametrize("plan", KINDS)
def test_a_failed_evaluation_leaves_no_old_parameters_behind(pool: Pool, plan: str) -> None:
    assert max(pool.run(_failed_evaluation, plan, world_size=2)) < 1e-5
