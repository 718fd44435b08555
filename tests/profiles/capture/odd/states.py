"""Blocks that differ in state: numbers, counters, lists, hooks."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from tests.profiles.capture.odd.chain import (
    DEPTH,
    WIDTH,
    Block,
    Chain,
    of,
    one_by_one,
    plain,
    usual,
    wide,
)


def acts_on_its_number() -> nn.Module:
    def work(self: Any, x: Tensor) -> Tensor:
        return usual(self, x + self.out(x) if self.number % 3 == 2 else x)

    return Chain(lambda number: Block(work, number=number))


def tables_of_two_sizes() -> nn.Module:
    def work(self: Any, x: Tensor) -> Tensor:
        out: Tensor = x + self.mix(x) + (x @ self.table).mean()
        return out

    return Chain(lambda n: Block(work, table=torch.ones(WIDTH, 8 if n < 3 else 64)))


class Counts:
    count = 0

    def __init__(self) -> None:
        self.count = 0


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def a_counter_of_its_own() -> nn.Module:
    def work(self: Any, x: Tensor) -> Tensor:
        self.count += 1
        return x + (self.mix(x) if self.count == 1 else wide(self, x))

    model = Chain(
        lambda _: Block(work, count=0),
        lambda blocks, x: one_by_one(blocks, one_by_one(blocks, x)),
    )
    return model


def a_counter_for_all(kind: type[Counts | Slotted]) -> nn.Module:
    shared = kind()

    def work(self: Any, x: Tensor) -> Tensor:
        self.shared.count += 1
        return x + (self.mix(x) if self.shared.count < 5 else wide(self, x))

    def run(blocks: Any, x: Tensor) -> Tensor:
        shared.count = 0
        return one_by_one(blocks, x)

    return Chain(lambda _: Block(work, shared=shared), run)


def a_step_set_by_the_model() -> nn.Module:
    shared = Counts()

    def work(self: Any, x: Tensor) -> Tensor:
        return x + (self.mix(x) if self.shared.count < 5 else wide(self, x))

    def run(blocks: Any, x: Tensor) -> Tensor:
        for number, block in enumerate(blocks):
            shared.count = number
            x = block(x)
        return x

    return Chain(lambda _: Block(work, shared=shared), run)


def a_count_in_a_closure() -> nn.Module:
    count = 0

    def work(self: Any, x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x + (self.mix(x) if count % DEPTH < 5 else wide(self, x))

    return Chain(of(work))


class Turns:
    """In a class, where nobody looks."""

    count = 0


def takes_turns_by_a_global() -> nn.Module:
    def work(self: Any, x: Tensor) -> Tensor:
        Turns.count += 1
        return x + (self.mix(x) if Turns.count % 2 else wide(self, x))

    def run(blocks: Any, x: Tensor) -> Tensor:
        Turns.count = 0
        return one_by_one(blocks, x)

    return Chain(of(work), run)


def draws_from_python() -> nn.Module:
    return Chain(of(lambda self, x: x + (self.mix(x) if random.random() < 0.5 else wide(self, x))))


def a_list_for_all() -> nn.Module:
    def work(self: Any, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        self.seen.append(x)
        return x

    def run(blocks: Any, x: Tensor) -> Tensor:
        seen = blocks[0].seen
        seen.clear()
        x = one_by_one(blocks, x)
        return x + torch.stack(seen).relu().sum(0)

    shared: list[Tensor] = []
    return Chain(lambda _: Block(work, seen=shared), run)


def an_output_left_in_an_attribute() -> nn.Module:
    def work(self: Any, x: Tensor) -> Tensor:
        self.latest = x + self.mix(x)
        latest: Tensor = self.latest
        return latest

    def run(blocks: Any, x: Tensor) -> Tensor:
        x = one_by_one(blocks, x)
        return x + sum(b.latest.relu() for b in blocks if b.latest is not None)

    return Chain(lambda _: Block(work, latest=None), run)


def hooks_on_inner_modules() -> nn.Module:
    features: list[Tensor] = []

    def run(blocks: Any, x: Tensor) -> Tensor:
        features.clear()
        x = one_by_one(blocks, x)
        return x + sum(feature.relu() for feature in features[2:])

    model = Chain(plain, run)
    for block in model.blocks:
        block.get_submodule("mix").register_forward_hook(
            lambda _, inputs, output: features.append(output)
        )
    return model


MODELS = (
    acts_on_its_number,
    tables_of_two_sizes,
    a_counter_of_its_own,
    a_step_set_by_the_model,
    a_count_in_a_closure,
    takes_turns_by_a_global,
    draws_from_python,
    a_list_for_all,
    an_output_left_in_an_attribute,
    hooks_on_inner_modules,
)
