"""Outputs that are objects: torch's wrappers look for tensors in tuples, lists and dicts alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Independent, Normal

from engines.data.hidden_outputs import closed, every_tensor_in, hidden_tensors, opened
from profiles.errors import ModelError
from tests.engines.cases import Case
from tests.engines.parity import (
    KINDS,
    gradient_error,
    local_rows,
    reference_loss,
    sgd,
    spread,
    state_error,
)
from tests.workers import Pool

ROWS = 6


class Features:
    """As users write them: no data class, no tuple."""

    __slots__ = ("extra", "hidden")

    def __init__(self, hidden: Tensor, extra: dict[str, Tensor]) -> None:
        self.hidden, self.extra = hidden, extra


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 32)
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Features:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x)))) * self.scale
        return Features(hidden, {"squares": hidden**2})


class Policy(nn.Module):
    """Its distribution compares values, so that a step may leave parameters unused: the wrappers
    then go by what the outputs depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()
        self.mean, self.value = nn.Linear(32, 2), nn.Linear(32, 1)
        self.spare = nn.Linear(32, 2)
        self.log_scale = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Independent, SimpleNamespace]:
        features = self.trunk(x)
        mean = self.mean(features.hidden)
        if mean.mean() > 1e6:
            mean = self.spare(features.hidden)
        value = self.value(features.extra["squares"]).squeeze(-1)
        chosen = Independent(Normal(mean, self.log_scale.exp()), 1)
        return chosen, SimpleNamespace(values=[value], policy=self)


def policy_loss(output: Any, target: Tensor) -> Tensor:
    chosen, others = output
    return F.mse_loss(others.values[0], target.sum(-1)) - chosen.log_prob(target).mean()


def batch(rows: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 8, generator=made), torch.randn(rows, 2, generator=made)


def _trained(plan: str, is_classic: bool) -> tuple[float, float]:
    reference, parallel = spread(Case(Policy, batch, policy_loss), plan)
    optimizer = sgd(list(reference.parameters()))
    whole = batch(ROWS)
    own = local_rows(parallel, whole, ROWS)
    worst = 0.0
    for _ in range(2):
        optimizer.zero_grad()
        reference_loss(reference, Case(Policy, batch, policy_loss), whole).backward()  # type: ignore[no-untyped-call]
        if is_classic:
            policy_loss(parallel(own[0]), own[1]).backward()  # type: ignore[no-untyped-call]
        else:
            parallel.forward_backward(own)
        worst = max(worst, gradient_error(parallel, reference))
        optimizer.step()
        parallel.optimizer.step()
        parallel.optimizer.zero_grad()
    return worst, state_error(parallel, reference)


@pytest.mark.dist
@pytest.mark.parametrize("is_classic", [False, True], ids=["step", "loop"])
@pytest.mark.parametrize("plan", KINDS)
def test_a_model_that_returns_objects_trains_as_one_process_does(
    pool: Pool, plan: str, is_classic: bool
) -> None:
    for gradient, parameter in pool.run(_trained, plan, is_classic, world_size=2):
        assert gradient < 1e-5
        assert parameter < 1e-5


class Keeping(nn.Module):
    """Keeps one thing, and returns another."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        self.squares = x * self.scale**2
        return x * self.scale


def _kept() -> str:
    _, parallel = spread(Case(Keeping, batch, lambda output, _: output.sum()), "dp_shard=2")
    parallel(batch(2)[0])
    parallel.module.squares.pow(2).sum().backward()
    with pytest.raises(ModelError) as refusal:
        parallel.optimizer.step()
    return refusal.value.what


@pytest.mark.dist
def test_gradients_that_fsdp_did_not_notice_are_refused(pool: Pool) -> None:
    for said in pool.run(_kept, world_size=2):
        assert "`scale` was not exchanged" in said


def test_tensors_are_found_in_objects_and_their_containers_and_not_in_modules() -> None:
    model = Policy()
    chosen, others = model(batch(2)[0])
    hidden = hidden_tensors((chosen, others))
    reached = {name for name, _ in model.named_parameters() if not name.startswith("spare")}
    gradients = torch.autograd.grad(
        sum(tensor.sum() for tensor in hidden), list(model.parameters()), allow_unused=True
    )
    named = zip(model.named_parameters(), gradients, strict=True)
    assert {name for (name, _), gradient in named if gradient is not None} == reached
    assert all(tensor.grad_fn is not None and tensor._base is None for tensor in hidden)


def test_an_output_without_objects_stays_as_it_is_and_one_with_objects_comes_back() -> None:
    plain = {"a": torch.ones(2, requires_grad=True) * 2, "b": [None, 3, "text"]}
    assert opened(plain) is plain
    assert len(every_tensor_in(plain)) == 1
    ring = SimpleNamespace(inner=plain)
    ring.itself = ring
    assert opened(ring) is not ring
    assert closed(opened(ring)) is ring
    with torch.no_grad():
        assert opened(ring) is ring
