"""Parameters that are frozen, unfrozen or added while a training goes on: as on one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.parallel import ParallelModel
from profiles.errors import ModelError
from tests.engines.cases import Case
from tests.engines.parity import KINDS, local_rows, reference_loss, spread, state_error
from tests.workers import Pool

WIDTH, ROWS = 8, 8
STAGES = "pp=2 schedule=gpipe microbatches=2 stages=blocks.1"
SPLIT = "tp=2 tensor_styles=blocks.*.0:column,blocks.*.2:row"


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(x)
        return logits


def _frozen() -> Stack:
    model = Stack()
    model.blocks[0].requires_grad_(False)
    return model


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, WIDTH), torch.randint(0, 3, (rows,))


CASE, FROZEN = Case(Stack, _batch), Case(_frozen, _batch)


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _unfrozen(plan: str) -> float:
    """Error of the parameters after four steps, of which two know all of them."""
    reference, parallel = spread(FROZEN, plan, rows=ROWS, optimizer=_sgd)
    optimizer = _sgd([p for p in reference.parameters() if p.requires_grad])
    for step in range(4):
        if step == 2:
            for model, own in ((reference, optimizer), (parallel.module, parallel.optimizer)):
                block = model.get_submodule("blocks.0").requires_grad_(True)
                own.add_param_group({"params": list(block.parameters())})
        batch = FROZEN.batch(ROWS + step)
        reference_loss(reference, FROZEN, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        parallel.train_step(local_rows(parallel, batch, ROWS + step))
    return state_error(parallel, reference)


@pytest.mark.dist
@pytest.mark.parametrize("plan", [*KINDS, SPLIT])
def test_a_block_that_begins_to_learn_learns_as_on_one_process(pool: Pool, plan: str) -> None:
    assert max(pool.run(_unfrozen, plan, world_size=2)) < 1e-5


class Weighted(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target) * torch.exp(-self.weight) + self.weight


def _with_a_learning_loss(plan: str) -> str:
    loss_fn = Weighted()
    case = Case(Stack, _batch, loss_fn)
    try:
        spread(case, plan, optimizer=lambda parameters: _sgd([*parameters, loss_fn.weight]))
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.dist
@pytest.mark.parametrize(
    "plan", ["dp_replicate=2", "dp_shard=2", "pp=2 schedule=gpipe microbatches=2 stages=blocks.1"]
)
def test_a_loss_whose_parameters_the_optimizer_steps_is_refused(pool: Pool, plan: str) -> None:
    for error in pool.run(_with_a_learning_loss, plan, world_size=2):
        assert "the optimizer has parameters that are not in the model: 1" in error
        assert "a loss with parameters of its own is a part of the model" in error


def _forget_the_optimizer(parallel: ParallelModel) -> None:
    parallel.module.get_submodule("blocks.0").requires_grad_(True)


def _add_a_head(parallel: ParallelModel) -> None:
    parallel.module.head = nn.Linear(WIDTH, 3)
    parallel.optimizer.add_param_group({"params": list(parallel.module.head.parameters())})


def _freeze(parallel: ParallelModel) -> None:
    parallel.module.get_submodule("blocks.1").requires_grad_(False)


def _hook(parallel: ParallelModel) -> None:
    parallel.module.get_submodule("head").weight.register_hook(torch.zeros_like)  # type: ignore[operator, union-attr]


CHANGES = {
    "forgotten": (_forget_the_optimizer, "`blocks.0.0.weight` learns by now, was frozen"),
    "added": (_add_a_head, "2 parameters that were not in the model when the plan was applied"),
    "hooked": (_hook, "`head.weight` got a hook for its gradient after the plan was applied"),
    "frozen": (_freeze, "`blocks.1.0.weight` was frozen after the plan was applied: DDP waits"),
}


def _refused(change: str, plan: str) -> tuple[str, float]:
    """The error of the next step, and by how much it moved the parameters."""
    _, parallel = spread(FROZEN, plan, rows=ROWS, optimizer=_sgd)
    parallel.train_step(local_rows(parallel, FROZEN.batch(ROWS), ROWS))
    before = parallel.module.get_submodule("blocks.1.0").weight.detach().clone()
    CHANGES[change][0](parallel)
    try:
        parallel.train_step(local_rows(parallel, FROZEN.batch(ROWS), ROWS))
    except ModelError as error:
        after = parallel.module.get_submodule("blocks.1.0").weight.detach()
        return str(error), float((after - before).abs().max())  # type: ignore[operator]
    return "", 0.0


@pytest.mark.dist
@pytest.mark.parametrize(
    ("change", "plan"),
    [
        ("forgotten", "dp_replicate=2"),
        ("forgotten", "dp_shard=2"),
        ("forgotten", SPLIT),
        ("added", "dp_shard=2"),
        ("added", SPLIT),
        ("hooked", "dp_shard=2"),
        ("hooked", "dp_replicate=2 zero=1"),
        ("frozen", "dp_replicate=2"),
    ],
)
def test_a_change_that_a_step_would_get_wrong_is_refused_before_it(
    pool: Pool, change: str, plan: str
) -> None:
    for error, moved in pool.run(_refused, change, plan, world_size=2):
        assert CHANGES[change][1] in error
        assert moved == 0
