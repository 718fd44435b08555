"""Parameters that a step, a rank or a whole training does not use."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
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
    relative,
    spread,
)
from tests.workers import Pool


class Experts(nn.Module):
    """Adds the output of expert `route`; of both while `route` is None, as in the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.route: int | None = None
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for number, expert in enumerate(self.experts):
            if self.route in (None, number):
                x = x + torch.tanh(expert(x))
        return x


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Experts(), Experts(), Experts())
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(x)[:, -1])
        return logits


ROUTED = Case(Routed, CASES["lstm"].batch, F.cross_entropy)


def route(model: nn.Module, choice: int) -> None:
    for module in model.modules():
        if isinstance(module, Experts):
            module.route = choice


def _each_rank_its_expert(plan: str) -> float:
    """Rank r uses expert r % 2 alone; gradient error against one process that does both parts."""
    reference, parallel = spread(ROUTED, plan)
    batch, rows = ROUTED.batch(8), 8
    replicas = parallel.data_world_size
    route(parallel.module, parallel.data_rank % 2)
    parallel.forward_backward(local_rows(parallel, batch, rows))
    for replica in range(replicas):
        route(reference, replica % 2)
        inputs, targets = (t.chunk(replicas)[replica] for t in batch)  # type: ignore[union-attr]
        (F.cross_entropy(reference(inputs), targets) / replicas).backward()
    return gradient_error(parallel, reference)


@pytest.mark.dist
@pytest.mark.parametrize("plan", [*KINDS[1:], HSDP])
def test_ranks_that_route_to_different_experts_train_like_one_process(
    pool: Pool, plan: str
) -> None:
    size = Plan.parse(plan).world_size
    assert max(pool.run(_each_rank_its_expert, plan, world_size=size, timeout_s=30)) < 1e-5


def _unused_after_the_sample() -> str:
    _, parallel = spread(ROUTED, "dp_replicate=2")
    batch = local_rows(parallel, ROUTED.batch(8), 8)
    parallel.train_step(batch)
    route(parallel.module, 0)
    try:
        parallel.train_step(batch)
    except ModelError as error:
        return str(error)
    return "no error"


@pytest.mark.dist
def test_ddp_names_a_parameter_that_a_step_does_not_use(pool: Pool) -> None:
    for text in pool.run(_unused_after_the_sample, world_size=2, timeout_s=20):
        assert "`blocks.0.experts.1.weight` got no gradient in this step" in text
        assert "`dp_shard` or `zero=1`" in text


def _unused_in_a_classic_loop() -> str:
    _, parallel = spread(ROUTED, "dp_replicate=2")
    inputs, targets = local_rows(parallel, ROUTED.batch(8), 8)  # type: ignore[misc]
    route(parallel.module, 0)
    F.cross_entropy(parallel(inputs), targets).backward()
    try:
        parallel(inputs)
    except ModelError as error:
        return str(error)
    return "no error"


@pytest.mark.dist
def test_ddp_reports_unused_parameters_in_a_classic_loop(pool: Pool) -> None:
    for text in pool.run(_unused_in_a_classic_loop, world_size=2, timeout_s=20):
        assert "outputs that had a loss do not depend on all of them" in text
        assert "give a sample that leaves the same parameters unused" in text


def _decay(plan: str) -> tuple[bool, bool, bool]:
    """After AdamW with weight decay: is the unused layer as it was, without gradient and state?"""
    case, reference, parallel = parallelize(
        "tied-frozen-unused",
        plan,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.5),
    )
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.1, weight_decay=0.5)
    batch = case.batch(8)
    parallel.forward_backward(local_rows(parallel, batch, 8))
    unused = parallel.module.get_parameter("never.weight")
    has_no_gradient = unused.grad is None
    parallel.optimizer.step()
    inputs, targets = batch  # type: ignore[misc]
    assert case.loss_fn is not None
    case.loss_fn(reference(inputs), targets).backward()
    optimizer.step()
    got, wanted = parallel.state_dict(), reference.state_dict()
    unmoved = torch.equal(got["never.weight"], wanted["never.weight"])
    # Adam's first step is +-lr, so a gradient near 0 may fall to the other side: norms are safe.
    moved_alike = relative(got["norm.weight"], wanted["norm.weight"]) < 1e-4
    return has_no_gradient and unused not in parallel.optimizer.state, unmoved, moved_alike


@pytest.mark.dist
@pytest.mark.parametrize("plan", [*KINDS, HSDP])
def test_parameters_that_are_never_used_do_not_decay(pool: Pool, plan: str) -> None:
    size = Plan.parse(plan).world_size
    assert pool.run(_decay, plan, world_size=size) == [(True, True, True)] * size
