"""Nine blocks in a row; what a block does and how they are run is an argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, DEPTH, ROWS = 8, 9, 4


class Block(nn.Module):
    """Calls `work` with the modules it is built with."""

    def __init__(self, work: Callable[..., Any] | None = None, **attributes: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.work = work or usual
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args: Any) -> Any:
        return self.work(self, *args)


def usual(self: Block, x: Tensor) -> Tensor:
    return x + wide(self, self.norm(x))


def wide(self: Block, x: Tensor) -> Tensor:
    out: Tensor = self.out(torch.relu(self.mix(x)))
    return out


def one_by_one(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


class Chain(nn.Module):
    def __init__(
        self, make: Callable[[int], nn.Module], run: Callable[[Any, Tensor], Tensor] = one_by_one
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([make(number) for number in range(DEPTH)])
        self.head = nn.Linear(WIDTH, 2)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.run(self.blocks, self.stem(x)))
        return out


def plain(_: int) -> Block:
    return Block()


def of(work: Callable[..., Any]) -> Callable[[int], Block]:
    return lambda _: Block(work)
