"""Updates of a user's own loop under tp: other optimizers, norms and steps by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.parallel import ParallelModel
from profiles.errors import InputError, RankMismatchError
from tests.engines.cases import Case
from tests.engines.parity import spread, state_error
from tests.engines.tensor import units
from tests.workers import Pool

ROWS, LENGTH, RATE = 4, 2, 0.1
PLAN = (
    "tp=2 tensor_styles=stack.blocks.*.q:column,stack.blocks.*.k:column,stack.blocks.*.v:column,"
    "stack.blocks.*.o:row"
)
Model = nn.Module | ParallelModel


class Normed(nn.Module):
    """Norms of queries and keys: a rank has the gradient of its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, units.WIDTH)
        self.stack = units.Stack([units.NormedHeads(), units.NormedHeads()])
        self.head = nn.Linear(units.WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.stack(self.enter(x)).mean(1))
        return out


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, LENGTH, 8), torch.randint(0, 4, (rows,))


def _by_optimizer(model: Model) -> Callable[[], object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


@torch.no_grad()
def _by_hand(model: Model) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter -= RATE * parameter.grad
            parameter.grad = None


def _after_a_sum(model: Model) -> None:
    if isinstance(model, ParallelModel):
        model.full_gradients()
    _by_hand(model)


def _clipped(model: Model) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer = model.optimizer if isinstance(model, ParallelModel) else None
    assert isinstance(optimizer, torch.optim.Optimizer)
    optimizer.step()


UPDATES = {
    "optimizer": _by_optimizer,
    "hand": lambda model: lambda: _by_hand(model),
    "after a sum": lambda model: lambda: _after_a_sum(model),
    "clipped": lambda model: lambda: _clipped(model),
}


def _error(kind: str) -> float | str:
    """Error of the parameters after two steps, or the refusal."""
    reference, parallel = spread(Case(Normed, _batch), PLAN, rows=ROWS)
    inputs, target = _batch(ROWS)
    updates = [UPDATES[kind](parallel)] + [UPDATES[kind](reference)] * (kind != "clipped")
    try:
        for _ in range(2):
            for model, update in zip((parallel, reference), updates, strict=False):
                F.cross_entropy(model(inputs), target).backward()
                update()
    except (InputError, RankMismatchError) as error:
        return error.what
    return state_error(parallel, reference)


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["optimizer", "after a sum"])
def test_updates_of_a_loop_see_whole_gradients(pool: Pool, kind: str) -> None:
    for error in pool.run(_error, kind, world_size=2):
        assert error < 1e-5


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("hand", "was changed by hand after a backward: its gradient was a part of a sum"),
        ("clipped", "gradients of what every rank of the tp axis has whole differ"),
    ],
)
def test_updates_by_parts_of_a_gradient_or_norm_are_refused(
    pool: Pool, kind: str, said: str
) -> None:
    for error in pool.run(_error, kind, world_size=2):
        assert said in str(error)
