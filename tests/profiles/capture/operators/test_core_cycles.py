"""Operators that take a core longer than their bytes do, counted by their elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiles.capture.capture import capture
from profiles.model.profile import Numerics, UnitCost

ROWS, CHANNELS, SIDE = 2, 4, 8
ELEMENTS = ROWS * CHANNELS * SIDE * SIDE
OPERATORS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    # Cycles of an element, forward and backward, less bytes of it at four a cycle. The gradient of
    # the output is one number, which no bytes are read for.
    "dropout": (lambda x: F.dropout(x, 0.1), 15 - 4 / 4, 0),
    "tanh": (torch.tanh, 7 - 8 / 4, 0),
    "gelu": (lambda x: F.gelu(x, approximate="tanh"), 4 - 8 / 4, 5 - 8 / 4),
    "exact": (F.gelu, 0, 0),
    "relu": (F.relu, 0, 0),
    "square": (lambda x: x**2, 0, 0),
    "root": (lambda x: (x * x + 1) ** 0.3, 5.5 - 8 / 4, 5.5 - 8 / 4),
    "root of each": (lambda x: (x * x + 1) ** (x * 0 + 0.3).detach(), 5.5 - 12 / 4, 5.5 - 12 / 4),
    "exponential": (lambda x: 2.0**x, 5.5 - 8 / 4, 0),
    # Sixteen windows of four elements, over 64; each writes a value, and where it was, in 8 bytes.
    "pool": (lambda x: F.max_pool2d(x, 2), (34 + 4 * 5) / 4 - (4 + 12 / 4) / 4, 0),
}


class Around(nn.Module):
    """An operation between two layers."""

    def __init__(self, operation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(self.first(x))


def cost_of(operation: Callable[[Tensor], Tensor]) -> UnitCost:
    sample = torch.zeros(ROWS, CHANNELS, SIDE, SIDE)
    profile = capture(nn.Sequential(Around(operation)), sample)
    costs = [unit.cost(Numerics.AS_BUILT) for unit in profile.units if "0" in unit.name]
    assert len(costs) == 1
    return costs[0]


@pytest.mark.parametrize("name", OPERATORS)
def test_cycles_are_those_of_the_elements_beyond_their_bytes(name: str) -> None:
    operation, forward, backward = OPERATORS[name]
    plain, cost = cost_of(lambda x: x), cost_of(operation)
    for direction, expected in (("forward", forward), ("backward", backward)):
        whole, rest = (getattr(each, f"{direction}_cycles").at(ROWS) for each in (cost, plain))
        assert whole - rest == pytest.approx(expected * ELEMENTS, abs=ELEMENTS / 50)


def test_what_is_sorted_counts_by_the_halvings_of_a_row() -> None:
    one = cost_of(lambda x: x.flatten(1).sort(dim=1)[0]).forward_cycles.at(ROWS)
    halvings = 8  # rows of 256
    assert one == pytest.approx(ELEMENTS * (14 * halvings - 16 / 4), rel=0.02)


def test_a_number_by_itself_is_sorted_for_nothing() -> None:
    cost = cost_of(lambda x: x * x.mean().sort()[0])
    assert cost.forward_cycles.at(ROWS) == 0


def test_attention_counts_as_a_call_and_not_as_an_operator() -> None:
    cost = cost_of(lambda x: F.scaled_dot_product_attention(x, x, x))
    assert len(list(cost.calls())) == 1
    assert cost.forward_cycles.at(ROWS) == cost.backward_cycles.at(ROWS) == 0
