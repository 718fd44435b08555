"""Factories for what-ifs: a model alone, one with its sample, one with learned positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

TOKENS = 32
POSITIONS = 64
calls: list[str] = []
"""Factories that were called, in order."""


class Small(nn.Module):
    """An embedding, two blocks and a head; with learned positions where `positions` is given."""

    def __init__(self, positions: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.places = nn.Embedding(positions, 16) if positions else None
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.ReLU()) for _ in range(2))
        self.back = nn.Linear(64, 16)
        self.head = nn.Linear(16, 100)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.places is not None:
            x = x + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = x + self.back(block(x))
        return self.head(x)  # type: ignore[no-any-return]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def alone() -> nn.Module:
    calls.append("alone")
    return Small()


def with_sample() -> tuple[nn.Module, tuple[Tensor, Tensor], object]:
    calls.append("with_sample")
    ids = torch.zeros(2, TOKENS, dtype=torch.long)
    return Small(), (ids, ids), loss


def with_positions() -> tuple[nn.Module, tuple[Tensor, Tensor], object]:
    ids = torch.zeros(2, TOKENS, dtype=torch.long)
    return Small(POSITIONS), (ids, ids), loss
