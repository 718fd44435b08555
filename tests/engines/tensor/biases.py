"""Models whose attention has a bias of scores, or a scale, with a number for every head."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engines.tensor.units import WIDTH, Attention

HEADS = 4
TOKENS = 8
REACH = 3  # distances farther than that count as that


class Biased(Attention):
    """Attention whose scores get a bias that its caller gives."""

    def attend(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        mixed = (q @ k.mT + bias).softmax(-1) @ v
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


def distances(tokens: int) -> Tensor:
    places = torch.arange(tokens)
    return (places[None] - places[:, None]).clamp(-REACH, REACH) + REACH


class SharedTableBlock(Biased):
    """T5's block: the first makes the bias from a table, and all hand it on."""

    def __init__(self, *, has_table: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.table = nn.Embedding(2 * REACH + 1, HEADS) if has_table else None

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if bias is None:
            assert self.table is not None
            bias = self.table(distances(x.shape[1])).permute(2, 0, 1)[None]
        return x + self.attend(self.norm(x), bias), bias


class SharedTable(nn.Module):
    """T5's way: one table for all blocks."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SharedTableBlock(has_table=not n) for n in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        bias = None
        for block in self.blocks:
            x, bias = block(x, bias)
        return x


class SlopesBlock(Biased):
    """BLOOM's block: samples lie before heads in one dimension, and its weights of attention are
    returned, which no code reads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS

    def forward(self, x: Tensor, alibi: Tensor) -> tuple[Tensor, Tensor]:
        shape = len(x) * self.num_heads, x.shape[1], self.width_of_head
        q, k, v = (self.heads(layer(x)).reshape(shape) for layer in (self.q, self.k, self.v))
        weights = alibi.baddbmm(q, k.mT).softmax(-1)
        mixed = (weights @ v).view(len(x), self.num_heads, *shape[1:])
        return x + self.o(mixed.transpose(1, 2).flatten(2)), weights


class Slopes(nn.Module):
    """ALiBi, computed for all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SlopesBlock(), SlopesBlock()])

    def forward(self, x: Tensor) -> Tensor:
        slopes = 2.0 ** -torch.arange(1, HEADS + 1, dtype=x.dtype)
        alibi = slopes[:, None, None] * torch.arange(x.shape[1], dtype=x.dtype)
        for block in self.blocks:
            x, _ = block(x, alibi.repeat(len(x), 1, 1))
        return x


class Windowed(Biased):
    """Swin's way: a parameter of (distances, heads), and Swin v2's: a scale for every head."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()
        self.scale = nn.Parameter(torch.ones(HEADS, 1, 1))

    def heads(self, x: Tensor) -> Tensor:
        return F.normalize(super().heads(x), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), super().heads(self.v(x))
        scores = q @ k.mT * self.scale + self.positions(x.shape[1])
        out: Tensor = self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + out


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2 * REACH + 1, HEADS))

    def forward(self, tokens: int) -> Tensor:
        return self.table[distances(tokens)].permute(2, 0, 1)


class Buffered(Biased):
    """Slopes that the model keeps in a buffer, which its checkpoints have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, HEADS + 1).float()[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        bias: Tensor = self.get_buffer("slopes").to(x.dtype) * torch.arange(x.shape[1])
        return x + self.attend(x, bias)


class Windows(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module] = Windowed) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind(), kind()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def buffered() -> nn.Module:
    return Windows(Buffered)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a table for all blocks": SharedTable,
    "slopes by argument": Slopes,
    "tables of windows": Windows,
    "slopes in a buffer": buffered,
}


class WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().mean()
        return loss


def sample(rows: int = 2, tokens: int = TOKENS) -> Tensor:
    return torch.randn(rows, tokens, WIDTH, generator=torch.Generator().manual_seed(3))
