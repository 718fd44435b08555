"""Sums of values that cross a cut as one, against models whose sums are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from profiles.model.flow import Flow
from tests.profiles.model.flows import WIDTH, before, flow_of, linear

Step = Callable[[Tensor, nn.Module, Tensor], Tensor]
"""From a stream, a block and the first value of the stream to the stream after the block."""


class Stream(nn.Module):
    """Blocks whose sums are code of the model."""

    def __init__(self, step: Step, finish: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.enter, self.leave = linear(), linear()
        self.blocks = nn.ModuleList(linear() for _ in range(3))
        self._step, self._finish = step, finish

    def forward(self, x: Tensor) -> Tensor:
        first = self.enter(x)
        x = first
        for block in self.blocks:
            x = self._step(x, block, first)
        output: Tensor = self.leave(self._finish(x, first))
        return output


def last(x: Tensor, first: Tensor) -> Tensor:
    return x


def crossing(flow: Flow, unit: str) -> list[tuple[str, ...]]:
    """Units whose values make up each tensor that crosses the cut before `unit`."""
    sums = flow.crossing_terms(before(flow, unit))
    return [tuple(flow.calls[call].unit for call, _ in terms) for terms in sums]


def in_place(x: Tensor, block: nn.Module, first: Tensor) -> Tensor:
    x += block(x)
    return x


@pytest.mark.parametrize(
    "step",
    [
        lambda x, block, first: x + block(x),
        lambda x, block, first: block(x) + x,
        lambda x, block, first: torch.add(x, block(torch.tanh(x))),
        in_place,
    ],
    ids=["sum", "turned", "normed", "in place"],
)
def test_a_residual_stream_crosses_as_one(step: Step) -> None:
    flow = flow_of(Stream(step, last))
    assert crossing(flow, "blocks.0") == [("enter",)]
    assert crossing(flow, "blocks.2") == [("enter", "blocks.0", "blocks.1")]
    assert crossing(flow, "leave") == [("enter", "blocks.0", "blocks.1", "blocks.2")]
    (value,) = flow.crossing(before(flow, "leave"))
    assert value.bytes.at(3) == 3 * WIDTH * 4


def test_a_value_that_is_taken_alone_too_crosses_alone() -> None:
    flow = flow_of(Stream(lambda x, block, _: x + block(x), lambda x, first: x * first))
    assert crossing(flow, "blocks.2") == [("enter",), ("blocks.0", "blocks.1")]
    edges = {(e.source, e.target): e.is_summed for e in flow.edges}
    enter, leave, block = (before(flow, name) for name in ("enter", "leave", "blocks.0"))
    assert not edges[enter, leave]
    assert edges[block, leave]


@pytest.mark.parametrize(
    "step",
    [
        lambda x, block, first: x + 2 * block(x),
        lambda x, block, first: torch.add(x, block(x), alpha=2),
        lambda x, block, first: x - block(x),
        lambda x, block, first: x + block(x)[:1],
        lambda x, block, first: x + block(x).flip(0),
        lambda x, block, first: x + block(x).view(WIDTH, -1).t().reshape(x.shape),
    ],
    ids=["scaled", "alpha", "difference", "broadcast", "flipped", "turned"],
)
def test_other_code_keeps_values_apart(step: Step) -> None:
    flow = flow_of(Stream(step, last))
    assert crossing(flow, "blocks.2")[:2] == [("enter",), ("blocks.0",)]


def test_code_that_changes_a_sum_takes_it_as_one() -> None:
    flow = flow_of(Stream(lambda x, block, first: torch.relu_(x + block(x)), last))
    assert crossing(flow, "blocks.2") == [("enter", "blocks.0"), ("blocks.1",)]


def test_a_stream_that_starts_anew_is_another_sum() -> None:
    """Every second block adds to the first value again: what went before it is in the stream of
    its own."""
    flow = flow_of(Stream(lambda x, block, first: first + block(x), last))
    assert crossing(flow, "blocks.2") == [("enter",), ("blocks.1",)]
    assert crossing(flow, "leave") == [("enter", "blocks.2")]


def test_a_value_added_twice_is_not_its_sum() -> None:
    flow = flow_of(
        Stream(lambda x, block, _: block(x) + block.weight.new_zeros(()), lambda x, _: x + x)
    )
    assert crossing(flow, "leave") == [("blocks.2",)]
    assert not flow.sums


class Reads(nn.Module):
    """Reads an earlier value behind the back of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.aside: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) * self.aside[0]
        return out


class Behind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.reads = linear(), linear(), Reads()

    def forward(self, x: Tensor) -> Tensor:
        first = self.enter(x)
        self.reads.aside = [first]
        out: Tensor = self.reads(first + self.middle(first))
        self.reads.aside = []
        return out


def test_a_term_that_is_read_behind_the_arguments_crosses_alone() -> None:
    flow = flow_of(Behind())
    target = next(n for n, call in enumerate(flow.calls) if call.unit.startswith("reads"))
    names = [tuple(flow.calls[c].unit for c, _ in terms) for terms in flow.crossing_terms(target)]
    assert names == [("enter",), ("middle",)]
