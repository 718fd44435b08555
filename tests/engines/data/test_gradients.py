"""Gradients are read in few tensors, and in no other values than their own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from engines.data.gradients import GradientBuckets, in_buckets, with_small_ones_joined
from tests.workers import Pool


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def test_views_that_fill_a_tensor_are_read_as_that_tensor() -> None:
    bucket = torch.arange(10.0)
    views = [bucket[4:].view(2, 3), bucket[:4]]
    assert [each is bucket for each in in_buckets(views)] == [True]


@pytest.mark.parametrize(
    "views",
    [
        lambda bucket: [bucket[:4], bucket[5:]],
        lambda bucket: [bucket[:5], bucket[:5]],
        lambda bucket: [bucket[:5], bucket[4:9]],
        lambda bucket: [bucket[:8].view(2, 4).t(), bucket[8:]],
        lambda bucket: [bucket[:9], bucket[9:].expand(1)[:0]],
    ],
    ids=["gap", "twice", "overlap", "other strides", "empty"],
)
def test_views_that_do_not_fill_it_are_read_alone(views: object) -> None:
    own = views(torch.arange(10.0))  # type: ignore[operator]
    assert [id(each) for each in in_buckets(own)] == [id(each) for each in own]


def test_small_tensors_are_joined_by_dtype_and_large_ones_are_not_copied() -> None:
    large = torch.randn(2**14)
    few = [torch.randn(3), large, torch.randn(2, 2).double(), torch.randn(5)]
    joined = with_small_ones_joined(few)
    assert [each.numel() for each in joined] == [2**14, 8, 4]
    assert joined[0] is large
    assert _norm(joined) == pytest.approx(_norm(few))


def _read(steps: int) -> list[tuple[int, float, float]]:
    """Tensors that are read after each step, their norm, and that of the gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    runner = DistributedDataParallel(model, gradient_as_bucket_view=True)
    buckets = GradientBuckets(tuple(model.named_parameters()), stay=True)
    seen = []
    for step in range(steps):
        model.zero_grad()
        runner(torch.randn(3, 8)).square().sum().backward()
        if step == steps - 1:
            model[0].bias.grad = torch.full((16,), 7.0)  # a loop may give it another one
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        tensors = buckets.now()
        seen.append((len(tensors), _norm(tensors), _norm(gradients)))
    return seen


def test_gradients_of_ddp_are_read_by_its_buckets_until_one_is_another(pool: Pool) -> None:
    for seen in pool.run(_read, 5, world_size=2):
        assert [read == pytest.approx(own) for _, read, own in seen] == [True] * 5
        assert [count for count, _, _ in seen] == [1, 1, 1, 1, 4]
