"""Selective recompute of products that later operations write into: the model's own gradients."""

from __future__ import annotations

import os
import warnings
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.blocks.selective import OTHER_PRODUCT, selective_contexts
from engines.plan import Plan
from tests.contract.watch import LiveBytes
from tests.engines.cases import CASES, Case
from tests.engines.parity import gradient_error, local_rows, reference_loss, spread
from tests.regret.models import MODELS
from tests.workers import Pool


class Overwritten(nn.Module):
    """Reads a product before and after it is changed to what no second change would leave."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 12)
        self.out = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        mean = y.mean(-1, keepdim=True)
        y.mul_(2.0).add_(0.5)
        y = self.out(torch.tanh(y) + mean)
        y += x
        return cast(Tensor, y)


class Stack(nn.Module):
    """Code between its blocks writes into what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [Overwritten(), nn.Linear(6, 6), Overwritten(), nn.Linear(6, 6)]
        )
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number % 2:
                x.add_(1.0).mul_(0.5)
        logits: Tensor = self.head(x[:, -1])
        return logits


STACK = Case(Stack, CASES["lstm"].batch, F.cross_entropy)


class Summed(nn.Module):
    """A product whose sum over tp ranks something behind it reads, so that it runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 12)
        self.out = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.out(torch.relu(self.inner(x))))


class Sums(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Summed(), Summed()])


SUBJECTS = {
    "a stack": STACK,
    "a U-Net": MODELS["unet"],
    "sums": Case(Sums, CASES["lstm"].batch, F.cross_entropy),
}
PAIRS = "tensor_styles=blocks.*.inner:column,blocks.*.out:row"
"""Of layers whose products are summed over the ranks in place."""


def _error(name: str, plan: str) -> float:
    case = SUBJECTS[name]
    reference, parallel = spread(case, plan)
    batch = case.batch(4)
    reference_loss(reference, case, batch).backward()
    parallel.forward_backward(local_rows(parallel, batch, 4))
    return gradient_error(parallel, reference)


@pytest.mark.parametrize("name", SUBJECTS)
def test_products_that_are_changed_in_place_are_kept_as_they_were(name: str) -> None:
    assert _error(name, "dp_replicate=1 recompute=selective") < 1e-5


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("a stack", "dp_shard=2"),
        ("a stack", "pp=2 schedule=1f1b microbatches=2 stages=blocks.2"),
        ("a U-Net", "dp_replicate=2 zero=1 microbatch_size=1 accumulation=2"),
        ("sums", f"tp=2 {PAIRS}"),
    ],
)
def test_they_are_under_shards_and_in_stages(pool: Pool, name: str, plan: str) -> None:
    size = Plan.parse(plan).world_size
    assert max(pool.run(_error, name, f"{plan} recompute=selective", world_size=size)) < 1e-5


def test_they_are_in_compiled_blocks() -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no processes that outlive the test
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's inductor imports what torch itself deprecates
        assert _error("a stack", "dp_replicate=1 compile=true recompute=selective") < 1e-5


def test_a_product_in_place_is_not_computed_again() -> None:
    first, second = selective_contexts()
    x, weight = torch.randn(4, 4), torch.randn(4, 4)
    with first:
        made = (x @ weight).relu_()
    with second:
        weight.zero_()
        assert torch.equal((x @ weight).relu_(), made)
        with pytest.raises(RuntimeError, match=OTHER_PRODUCT):
            x @ weight


def test_a_product_of_other_shapes_is_not_taken_for_one_that_is_kept() -> None:
    first, second = selective_contexts()
    x = torch.randn(4, 4)
    with first:
        x @ x
    with second, pytest.raises(RuntimeError, match=OTHER_PRODUCT):
        x[:2] @ x


def test_a_product_is_copied_only_where_it_is_changed() -> None:
    x, weight = torch.randn(8, 8), torch.randn(8, 8)

    def peak(*, in_place: bool) -> int:
        first, _ = selective_contexts()
        watched = LiveBytes([x, weight])
        with watched, first:
            y = x @ weight
            y = y.relu_() if in_place else y.view(64)
        return watched.peak_bytes - x.nbytes - weight.nbytes

    assert peak(in_place=False) == x.nbytes
    assert peak(in_place=True) == 2 * x.nbytes
