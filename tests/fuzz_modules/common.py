"""Blocks that most networks have, (rows, tokens, width) to the same; sizes are drawn."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 23

Build = Callable[[Random, int], nn.Module]
COMMON: dict[str, Build] = {}
"""By name: a block of this width. Some take `ids` or `mask` too: `takes` names them."""


def block(registry: dict[str, Build]) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a class whose `__init__` takes (draw, width), by its name in lower case."""

    def register(kind: type[nn.Module]) -> type[nn.Module]:
        name = "".join(f"-{c.lower()}" if c.isupper() else c for c in kind.__name__)[1:]
        registry[name] = kind
        return kind

    return register


def hidden_size(draw: Random, width: int) -> int:
    """Often twice or four times the width, sometimes a number that nothing divides."""
    return draw.choice((2 * width, 2 * width, 4 * width, 2 * width + 1, width // 2 + 1, width))


def head_count(draw: Random, width: int) -> int:
    return draw.choice([n for n in (1, 2, 3, 4, 5, 6) if width % n == 0])


def activation(draw: Random) -> nn.Module:
    return draw.choice((nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.ELU))()


def norm(draw: Random, width: int) -> nn.Module:
    return draw.choice((nn.LayerNorm, nn.RMSNorm, nn.Identity))(width)


@block(COMMON)
class Mlp(nn.Module):
    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        size, bias = hidden_size(draw, width), draw.random() < 0.8
        self.norm, self.act = norm(draw, width), activation(draw)
        self.up = nn.Linear(width, size, bias=bias)
        self.down = nn.Linear(size, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


@block(COMMON)
class GatedMlp(nn.Module):
    """With gate and value in one layer, or in two."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        size, self.is_fused = hidden_size(draw, width), draw.random() < 0.5
        self.gate = nn.Linear(width, 2 * size if self.is_fused else size)
        if not self.is_fused:
            self.value = nn.Linear(width, size)
        self.out = nn.Linear(size, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.gate(x).chunk(2, -1) if self.is_fused else (self.gate(x), self.value(x))
        return x + self.out(F.silu(gate) * value)


@block(COMMON)
class MultiheadAttention(nn.Module):
    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.norm = norm(draw, width)
        heads = head_count(draw, width)
        self.needs_weights = draw.random() < 0.3
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=self.needs_weights)[0]


@block(COMMON)
class OwnAttention(nn.Module):
    """Fused or separate projections, causal or not, with or without norms of the heads."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.heads, self.is_causal = head_count(draw, width), draw.random() < 0.5
        self.is_fused = draw.random() < 0.5
        if self.is_fused:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in "qkv")
        self.head_norm = nn.LayerNorm(width // self.heads) if draw.random() < 0.4 else None
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = self.qkv(y).chunk(3, -1) if self.is_fused else (self.q(y), self.k(y), self.v(y))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        if self.head_norm is not None:
            q, k = self.head_norm(q), self.head_norm(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


@block(COMMON)
class Convolution(nn.Module):
    """Over tokens: plain, depthwise or grouped, with a norm of channels."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        groups = draw.choice((1, 1, width))
        self.conv = nn.Conv1d(width, width, 3, padding=1, groups=groups)
        # Over two tokens an instance norm is a sign: with torch's `eps` gradients are all rounding.
        norms = (nn.GroupNorm(1, width), nn.BatchNorm1d(width), nn.InstanceNorm1d(width, eps=0.1))
        self.norm = draw.choice((*norms, nn.Identity()))
        self.point = nn.Conv1d(width, width, 1) if draw.random() < 0.5 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x.transpose(1, 2)
        y = y + self.point(F.gelu(self.norm(self.conv(y))))
        return y.transpose(1, 2)


@block(COMMON)
class Recurrence(nn.Module):
    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        kind = draw.choice((nn.LSTM, nn.GRU, nn.RNN))
        self.cell = kind(width, width, num_layers=draw.choice((1, 2)), batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cell(x)[0]


@block(COMMON)
class EncoderLayer(nn.Module):
    """torch's own, called without its fast path."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        heads, size = head_count(draw, width), hidden_size(draw, width)
        self.layer = nn.TransformerEncoderLayer(
            width, heads, size, 0.0, batch_first=True, norm_first=draw.random() < 0.5
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@block(COMMON)
class Masked(nn.Module):
    """Attention that hides padded tokens; the mask comes with the batch."""

    takes = ("mask",)

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, head_count(draw, width), batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.attention(x, x, x, key_padding_mask=mask, need_weights=False)[0]


@block(COMMON)
class Experts(nn.Module):
    """A soft mixture: all experts see all tokens."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        count = draw.choice((2, 3))
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(Mlp(draw, width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        each = torch.stack([expert(x) for expert in self.experts], -1)
        return (each * weights[..., None, :]).sum(-1)
