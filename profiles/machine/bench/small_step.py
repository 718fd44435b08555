"""A training step too small to compute much: its seconds are those that its kernels cost the host.

An operation in a loop by itself costs a processor 3 us, one of a step five times that: it is called
by a module, makes its node of autograd and its output, and its backward goes through the engine.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS, WIDTH, HEADS = 4, 16, 2
ROWS, LENGTH = 2, 8
# Of `SmallModel`, forward and backward, as `profiles.capture` counts those of every model: 10 and
# 20 in a block, and the sum. What is charged for a kernel was divided by the same count.
KERNELS = 30 * LAYERS + 1


class SmallBlock(nn.Module):
    """Pre-norm attention and MLP, of plain modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # B, heads, T, C / heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        x = x + self.mlp(self.norm2(x))
        return x


class SmallModel(nn.Module):
    """Blocks, and the sum of what comes out, (B, T, C) to a number."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SmallBlock() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def small_input() -> Tensor:
    """(B, T, C), the same every time."""
    return torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


def small_step(device: torch.device) -> Callable[[], None]:
    """Forward and backward of `SmallModel` on `device`: `KERNELS` kernels.

    The optimizer's step is not part of it: nothing is charged for its launches.
    """
    with torch.random.fork_rng(devices=[]):  # a user's draws stay as they are
        model = SmallModel().to(device)
    x = small_input().to(device)

    def step() -> None:
        with torch.enable_grad():
            model(x).backward()
        model.zero_grad()

    return step
