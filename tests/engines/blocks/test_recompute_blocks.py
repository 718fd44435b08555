"""Recompute of some blocks: which ones run twice, and that gradients are those of all or none."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from engines.blocks.recompute import recomputed
from engines.plan import Plan
from tests.engines.cases import Case
from tests.engines.parity import gradient_error, local_rows, reference_loss, spread
from tests.factories import chain
from tests.workers import Pool


class Counted(nn.Module):
    """Counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        Counted.total[id(self)] = Counted.total.get(id(self), 0) + 1
        return x + self.out(torch.tanh(x))

    total: ClassVar[dict[int, int]] = {}


def _counted(plan: str) -> tuple[list[int], float]:
    """Forwards of each of five blocks in a step, and the error of its gradients."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), *(Counted() for _ in range(5)), nn.Linear(6, 3))

    case = Case(build, lambda rows: (torch.randn(rows, 6), torch.zeros(rows, dtype=torch.long)))
    reference, parallel = spread(case, plan)
    batch = case.batch(8)
    reference_loss(reference, case, batch).backward()
    Counted.total.clear()
    parallel.forward_backward(local_rows(parallel, batch, 8))
    blocks = [module for module in parallel.module.modules() if isinstance(module, Counted)]
    counts = [Counted.total.get(id(block), 0) for block in blocks]
    return counts, gradient_error(parallel, reference)


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("blocks", [1, 3, 5])
def test_the_first_blocks_are_recomputed(recompute: str, blocks: int) -> None:
    counts, error = _counted(f"recompute={recompute} recompute_blocks={blocks}")
    assert counts == [2] * blocks + [1] * (5 - blocks)
    assert error < 1e-6


@pytest.mark.dist
def test_the_first_block_of_each_stage_is_recomputed(pool: Pool) -> None:
    plan = "pp=2 schedule=gpipe microbatches=2 microbatch_size=4 stages=3 recompute=full"
    (first, error), (second, other) = pool.run(_counted, f"{plan} recompute_blocks=1", world_size=2)
    assert [first[:2], second[2:]] == [[4, 2], [4, 2, 2]]
    assert max(error, other) < 1e-6


def test_names_of_recomputed_blocks() -> None:
    profile = chain(units=5)
    names = [unit.name for unit in profile.units]
    assert recomputed(Plan.parse("recompute=full"), profile) == names
    assert recomputed(Plan(), profile) == []
    plan = Plan.parse(f"pp=2 stages={names[3]} recompute=selective recompute_blocks=2")
    assert recomputed(plan, profile) == [*names[:2], *names[3:]]
