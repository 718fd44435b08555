"""Share of matrix products and attention in a step: a sum of spans of a fake clock."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from engines.runtime import product_time as module
from engines.runtime.product_time import ProductTime

CPU = torch.device("cpu")


def test_products_and_attention_are_timed_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second passes with every look at the clock."""
    looks = iter(range(1000))
    monkeypatch.setattr(module.time, "thread_time", lambda: float(next(looks)))
    left = torch.rand(4, 4, requires_grad=True)
    heads = torch.rand(1, 2, 4, 8, requires_grad=True)
    times = ProductTime(CPU)
    with times:
        (left @ left).relu().sum().backward()  # one product, two of gradients
        scaled_dot_product_attention(heads, heads, heads).sum().backward()
    with times.whole():
        for _ in range(9):
            module.time.thread_time()
    # A second for each of five, of the ten that pass between the looks around the whole.
    assert times.share == 5 / 10


def test_elementwise_operations_count_as_no_products() -> None:
    times = ProductTime(CPU)
    left = torch.rand(4, 4, requires_grad=True)
    for watched in (times, times.whole()):
        with watched:
            left.exp().sum().backward()
    assert times.share == 0


@pytest.mark.timed
def test_large_products_take_most_of_their_time_in_products() -> None:
    matrix = torch.rand(512, 512)
    times = ProductTime(CPU)
    for _ in range(5):
        for watched in (times, times.whole()):
            with watched:
                matrix @ matrix
    assert 0.7 < times.share < 1.3
