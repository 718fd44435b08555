"""Hooks on gradients of parameters, where each rank has the gradient of its own rows."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.apply import apply_plan
from engines.data.gradient_hooks import HookTrial, tried_hooks
from engines.plan import Plan
from profiles.errors import PlanError
from tests.engines.cases import Case, cpu_ranks, profile_of
from tests.engines.parity import sgd
from tests.workers import Pool

WIDTH = 4
REPLICAS, MICROBATCHES = "dp_replicate=2", "dp_replicate=2 accumulation=2"
Hook = Callable[[Tensor], Tensor | None]


def hooked(hook: Hook) -> nn.Linear:
    model = nn.Linear(WIDTH, WIDTH)
    model.weight.register_hook(hook)
    return model


def _only_look(gradient: Tensor) -> None:
    seen.append(gradient.norm().item())


seen: list[float] = []
EXACT: dict[str, Hook] = {
    "mask": lambda gradient: gradient * torch.eye(WIDTH),
    "factor": lambda gradient: gradient / 3,
    "look": _only_look,
}
BENT: dict[str, Hook] = {
    "bound on elements": lambda gradient: gradient.clamp(-0.01, 0.01),
    "bound on the norm": lambda gradient: gradient / gradient.norm().clamp_min(1.0),
    "sign": torch.sign,
}


@pytest.mark.parametrize("plan", [REPLICAS, MICROBATCHES])
@pytest.mark.parametrize("name", EXACT)
def test_what_a_mask_makes_of_parts_is_what_it_makes_of_their_sum(name: str, plan: str) -> None:
    assert tried_hooks(hooked(EXACT[name]), Plan.parse(plan)) == HookTrial()
    assert not seen  # as it was before


@pytest.mark.parametrize("name", BENT)
def test_a_bound_makes_another_sum_of_parts(name: str) -> None:
    assert tried_hooks(hooked(BENT[name]), Plan.parse(REPLICAS)).bent_by_hook == "weight"
    assert tried_hooks(hooked(BENT[name]), Plan.parse("tp=2")) == HookTrial()


def test_what_a_hook_adds_is_in_a_mean_once_and_in_a_sum_of_microbatches_twice() -> None:
    model = hooked(lambda gradient: gradient + 1.0)
    assert tried_hooks(model, Plan.parse(REPLICAS)) == HookTrial()
    assert tried_hooks(model, Plan.parse(MICROBATCHES)).bent_by_hook == "weight"


class SteppedInBackward(nn.Module):
    """Steps each parameter as soon as it has its gradient, to save the memory of all."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        steps = {p: torch.optim.SGD([p], lr=0.1) for p in self.inner.parameters()}

        def step(parameter: Tensor) -> None:
            steps[parameter].step()  # type: ignore[index]
            steps[parameter].zero_grad()  # type: ignore[index]

        for parameter in steps:
            parameter.register_post_accumulate_grad_hook(step)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def test_a_trial_of_hooks_leaves_parameters_as_they_are() -> None:
    model = SteppedInBackward()
    before = [parameter.clone() for parameter in model.parameters()]
    assert tried_hooks(model, Plan.parse(REPLICAS)).stepped_by_hook == "inner.weight"
    assert all(map(torch.equal, before, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_ranks_that_share_the_tokens_of_a_sample_have_parts_of_its_gradient() -> None:
    model = hooked(BENT["bound on elements"])
    assert tried_hooks(model, Plan.parse("cp=2")).bent_by_hook == "weight"
    assert not tried_hooks(model, Plan.parse("tp=2")).bent_by_hook


def batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


def apply(plan: str, model: nn.Module) -> None:
    """Without the copies of other tests, which have no hooks."""
    case = Case(lambda: model, batch, F.mse_loss)
    apply_plan(
        model,
        Plan.parse(plan),
        profile=profile_of(case, model),
        cluster=cpu_ranks(2),
        loss_fn=F.mse_loss,
        optimizer=sgd,
        sample=batch(2),
    )


def _refusal(plan: str) -> str:
    try:
        apply(plan, SteppedInBackward())
    except PlanError as error:
        return error.what
    return ""


@pytest.mark.dist
@pytest.mark.parametrize("plan", [REPLICAS, "dp_shard=2"])
def test_optimizers_that_step_in_the_backward_are_refused_on_replicas(
    pool: Pool, plan: str
) -> None:
    for refusal in pool.run(_refusal, plan, world_size=2):
        assert "a hook changes `inner.weight` itself" in refusal


def _warnings(plan: str) -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("engines.data.gradient_hooks")
    logger.addHandler(handler)
    try:
        apply(plan, hooked(BENT["bound on elements"]))
    finally:
        logger.removeHandler(handler)
    return records


@pytest.mark.dist
def test_a_bound_on_replicas_is_warned_of(pool: Pool) -> None:
    first, second = pool.run(_warnings, REPLICAS, world_size=2)
    assert len(first) == 1
    assert "a hook on the gradient of `weight`" in first[0]
    assert not second
