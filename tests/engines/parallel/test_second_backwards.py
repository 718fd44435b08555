"""Loops that differentiate more than once after a forward: each beside the same on one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.parallel import ParallelModel
from profiles.errors import ModelError, RankMismatchError
from tests.engines.cases import Case
from tests.engines.parity import gradient_error, local_rows, sgd, spread, state_error
from tests.workers import Pool

WIDTH, ROWS = 16, 8
SPLIT = "tp=2 tensor_styles=blocks.*.0:column,blocks.*.2:row"
GATHERED = "tp=2 tensor_styles=blocks.*.0:column,blocks.*.2:row,head:gather"


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, WIDTH), torch.randint(0, 4, (rows,))


CASE = Case(Residual, _batch)
Model = nn.Module | ParallelModel


def _penalised(model: Model, x: Tensor, y: Tensor) -> None:
    """A loss with a penalty on the gradient of the input."""
    x = x.clone().requires_grad_()
    out = model(x)
    (of_input,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (F.cross_entropy(out, y) + of_input.square().sum(-1).mean()).backward()


def _apart(model: Model, x: Tensor, y: Tensor) -> None:
    """Two losses of one output, a backward each."""
    out = model(x)
    F.cross_entropy(out, y).backward(retain_graph=True)
    out.square().mean().backward()


def _errors(plan: str, of_penalty: bool) -> tuple[float, float]:
    reference, parallel = spread(CASE, plan, rows=ROWS)
    optimizer = sgd(list(reference.parameters()))
    differentiate = _penalised if of_penalty else _apart
    gradient = 0.0
    for _ in range(2):
        batch = CASE.batch(ROWS)
        assert isinstance(batch, tuple)
        differentiate(reference, *batch)
        mine = local_rows(parallel, batch, ROWS)
        assert isinstance(mine, tuple)
        differentiate(parallel, *mine)
        gradient = max(gradient, gradient_error(parallel, reference))
        for one in (parallel.optimizer, optimizer):
            one.step()
            one.zero_grad()
    return gradient, state_error(parallel, reference)


@pytest.mark.dist
@pytest.mark.parametrize("plan", [SPLIT, GATHERED, "dp_replicate=2"])
def test_a_penalty_on_a_gradient_has_the_gradient_that_it_has_on_one_process(
    pool: Pool, plan: str
) -> None:
    for errors in pool.run(_errors, plan, True, world_size=2):
        assert max(errors) < 1e-5


@pytest.mark.dist
@pytest.mark.parametrize(
    "plan", ["dp_shard=2", "dp_replicate=2 zero=1", SPLIT, "dp_shard=2 recompute=full"]
)
def test_two_backwards_of_one_output_add_up(pool: Pool, plan: str) -> None:
    for errors in pool.run(_errors, plan, False, world_size=2):
        assert max(errors) < 1e-5


def _refused() -> str:
    try:
        _errors("dp_replicate=2", False)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_a_second_backward_that_would_exchange_nothing_is_refused(pool: Pool) -> None:
    for error in pool.run(_refused, world_size=2):
        assert "a second backward" in error
        assert "one backward of their sum" in error


def _refused_graph(plan: str) -> str:
    try:
        _errors(plan, True)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_shard=2", "dp_replicate=2 zero=1", "dp_replicate=2 zero=2"])
def test_a_graph_over_freed_parameters_is_refused(pool: Pool, plan: str) -> None:
    for error in pool.run(_refused_graph, plan, world_size=2):
        assert "a gradient is to be differentiated again" in error
        assert "dp_replicate" in error


def _set_by_hand(plan: str) -> str:
    _, parallel = spread(CASE, plan, rows=ROWS)
    mine = local_rows(parallel, CASE.batch(ROWS), ROWS)
    assert isinstance(mine, tuple)
    parameters = list(parallel.parameters())
    loss = F.cross_entropy(parallel(mine[0]), mine[1])
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    with pytest.raises(RankMismatchError) as raised:
        parallel.optimizer.step()
    return str(raised.value)


@pytest.mark.dist
def test_gradients_that_replicas_did_not_exchange_are_refused_before_an_update(pool: Pool) -> None:
    for error in pool.run(_set_by_hand, "dp_replicate=2", world_size=2):
        assert "gradients of what every rank of the data axes has whole differ" in error
        assert "torch.autograd.grad" in error
