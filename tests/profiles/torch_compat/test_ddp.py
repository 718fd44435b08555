"""The buckets of DDP, taken from one job and given to the next."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from profiles.torch_compat.ddp import bucket_order, rebuild_buckets
from tests.workers import Pool


class OutOfOrder(nn.Module):
    """Three layers of two buckets, which run in another order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(600, 600), nn.Linear(8, 400)
        self.middle = nn.Linear(400, 600)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.middle(self.first(x)))
        return out


def sizes(runner: DistributedDataParallel) -> list[int]:
    """Bytes of each bucket, as gradients lie in memory."""
    storages = {
        p.grad.untyped_storage().data_ptr(): p.grad
        for p in runner.parameters()
        if p.grad is not None
    }
    return sorted(gradient.untyped_storage().nbytes() for gradient in storages.values())


def _orders() -> tuple[list[list[int]], list[list[int]], bool]:
    """Orders before the first backward, after it and later; bytes of buckets of two later jobs."""
    runner = DistributedDataParallel(OutOfOrder(), gradient_as_bucket_view=True)
    orders, layouts = [bucket_order(runner)], []
    for _ in range(3):
        runner(torch.ones(2, 8)).sum().backward()
        layouts.append(sizes(runner))
        runner.zero_grad()
        orders.append(bucket_order(runner))
    again = DistributedDataParallel(OutOfOrder(), gradient_as_bucket_view=True)
    rebuild_buckets(again, orders[1])
    is_clean = all(parameter.grad is None for parameter in again.parameters())
    orders.append(bucket_order(again))
    again(torch.ones(2, 8)).sum().backward()
    layouts.append(sizes(again))
    return orders, layouts, is_clean


@pytest.mark.dist
def test_a_job_has_the_buckets_of_the_last_one_from_its_first_backward_on(pool: Pool) -> None:
    for orders, layouts, is_clean in pool.run(_orders, world_size=2):
        before, *later = orders
        assert before == []
        # By hand: last is 0 and 1, first 2 and 3, middle 4 and 5; the bias comes first.
        assert later == [[1, 0, 5, 4, 3, 2]] * 4
        first, second, third, again = layouts
        assert len(first) == 1
        assert again == third == second
        assert len(second) == 2
        assert is_clean


def _unused() -> list[int]:
    runner = DistributedDataParallel(OutOfOrder(), find_unused_parameters=True)
    rebuild_buckets(runner, [5, 4, 3, 2, 1, 0])
    runner(torch.ones(2, 8)).sum().backward()
    return bucket_order(runner)


@pytest.mark.dist
def test_buckets_that_stay_as_they_are_have_no_order(pool: Pool) -> None:
    assert pool.run(_unused, world_size=2) == [[], []]
