"""Blocks that run and blocks that are substituted: costs are the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from profiles.capture.capture import capture
from profiles.model.profile import Affine, ModelProfile, Numerics, UnitCost

WIDTH, DEPTH, ROWS = 8, 9, 4


class Runs:
    """A count in a class: it outlives what a forward leaves on its module, and is no state."""

    count = 0


def counter() -> type[Runs]:
    class Counter(Runs):
        pass

    return Counter


class Block(nn.Module):
    def __init__(self, runs: type[Runs]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.runs = runs

    def forward(self, x: Tensor) -> Tensor:
        self.runs.count += 1
        return x + torch.relu(self.mix(self.norm(x)))


class Chain(nn.Module):
    def __init__(self, make: Callable[[int], nn.Module], depth: int = DEPTH) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([make(number) for number in range(depth)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def captured(model: nn.Module) -> ModelProfile:
    """The profile, after a check that it is that of every block."""
    sample = torch.randn(ROWS, WIDTH)
    profile, every = capture(model, sample), capture(model, sample, every_block=True)
    assert profile == every
    return profile


def runs_of(model: Chain, runs: type[Runs]) -> int:
    """Number of blocks that run in one trace (a capture takes two)."""
    captured(model)
    runs.count = 0
    capture(model, torch.randn(ROWS, WIDTH))
    assert runs.count % 2 == 0
    return runs.count // 2


def test_only_the_first_two_and_the_last_of_equal_blocks_run() -> None:
    runs = counter()
    assert runs_of(Chain(lambda _: Block(runs)), runs) == 3


def test_every_block_runs_on_request() -> None:
    runs = counter()
    capture(Chain(lambda _: Block(runs)), torch.randn(ROWS, WIDTH), every_block=True)
    assert runs.count == 2 * DEPTH


def test_blocks_that_know_their_place_are_equal() -> None:
    runs = counter()

    def make(number: int) -> nn.Module:
        block = Block(runs)
        block.layer_index = number  # type: ignore[assignment]
        return block

    assert runs_of(Chain(make), runs) == 3


def test_blocks_with_other_settings_are_not_equal() -> None:
    runs = counter()

    def make(number: int) -> nn.Module:
        block = Block(runs)
        block.is_wide = number % 2 == 0  # type: ignore[assignment]
        return block

    # Of each kind two run; the last of the list runs too, and is of the first kind.
    assert runs_of(Chain(make), runs) == 5


def test_frozen_blocks_are_not_equal_to_trained_ones() -> None:
    runs = counter()
    model = Chain(lambda _: Block(runs))
    for block in model.blocks[:4]:
        block.requires_grad_(False)
    assert runs_of(model, runs) == 2 + 2 + 1  # frozen, trained, the last


def test_parameters_that_no_block_uses_are_named_in_all_of_them() -> None:
    runs = counter()

    def make(_: int) -> nn.Module:
        block = Block(runs)
        block.spare = nn.Linear(2, 2)
        return block

    profile = captured(Chain(make))
    assert len(profile.unused) == 2 * DEPTH


class Tells(Block):
    """Also hands a tensor on by an attribute, as experts do with their balance loss."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.balance = out.square().mean()
        return out


class Balanced(Chain):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + sum(block.balance for block in self.blocks)


def test_a_tensor_that_leaves_by_an_attribute_makes_every_block_run() -> None:
    runs = counter()
    model = Balanced(lambda _: Tells(runs))
    captured(model)
    runs.count = 0
    capture(model, torch.randn(ROWS, WIDTH))
    assert runs.count == 2 * DEPTH


class Overwrites(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.runs.count += 1
        return torch.relu_(x + 0).add_(self.mix(self.norm(x))) + x.mul_(2)


def test_blocks_that_change_their_input_all_run() -> None:
    runs = counter()
    model = Chain(lambda _: Overwrites(runs))
    sample = torch.randn(ROWS, WIDTH)
    # The change is of a tensor that autograd keeps: a look without backward is enough here.
    model.requires_grad_(False)
    capture(model, sample)
    assert runs.count == 2 * DEPTH


class Memory:
    first: Tensor


class Remembers(Block):
    """Adds what the model left in an object, not in the arguments."""

    def __init__(self, runs: type[Runs], memory: Memory) -> None:
        super().__init__(runs)
        self.memory = memory

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.memory.first


class Leaves(Chain):
    def forward(self, x: Tensor) -> Tensor:
        memory = next(b.memory for b in self.blocks if isinstance(b, Remembers))
        x = memory.first = self.stem(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def test_blocks_that_take_more_than_their_arguments_all_run() -> None:
    runs, memory = counter(), Memory()
    assert runs_of(Leaves(lambda _: Remembers(runs, memory)), runs) == DEPTH


class Pair(Block):
    """Returns its argument beside its result, and a number."""

    def forward(self, pair: tuple[Tensor, Tensor, int]) -> tuple[Tensor, Tensor, int]:  # type: ignore[override]
        x, mask, _ = pair
        return super().forward(x) * mask, mask, 3


class Pairs(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        pair = (x, x.detach() > 0, 3)
        for block in self.blocks:
            pair = block(pair)
        out: Tensor = self.head(pair[0])
        return out


def test_a_tensor_passed_through_a_block_stays_the_same() -> None:
    runs = counter()
    assert runs_of(Pairs(lambda _: Pair(runs)), runs) == 3


def test_a_deep_model_costs_a_middle_block_more_for_each_further_one() -> None:
    sample = torch.randn(ROWS, WIDTH)
    depths = (6, 7, 60)
    costs = [_total(capture(Chain(lambda _: Block(counter()), depth), sample)) for depth in depths]
    for quantity, (six, seven, sixty) in {
        name: [cost[name] for cost in costs] for name in costs[0]
    }.items():
        assert sixty == pytest.approx(six + 54 * (seven - six)), quantity


def _total(profile: ModelProfile) -> dict[str, float]:
    quantities = [
        n
        for n in UnitCost.model_fields
        if UnitCost.model_fields[n].annotation is Affine and not n.endswith("transient_bytes")
    ]
    return {
        name: sum(getattr(u.cost(Numerics.AS_BUILT), name).at(ROWS) for u in profile.units)
        for name in quantities
    }
