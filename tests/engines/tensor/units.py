"""Small blocks, each with a trap for tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 32


class Attention(nn.Module):
    """Heads that are counted from the width, so that a rank's share simply is fewer."""

    def __init__(self, *, heads: int = 4, kv_heads: int | None = None) -> None:
        super().__init__()
        self.width_of_head = WIDTH // heads
        kv_width = (kv_heads or heads) * self.width_of_head
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, kv_width)
        self.v = nn.Linear(WIDTH, kv_width)
        self.o = nn.Linear(WIDTH, WIDTH)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.width_of_head).transpose(1, 2)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        mixed = self.scores(q, k).softmax(-1) @ v
        out: Tensor = self.o(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))
        return x + out


class CountedHeads(Attention):
    """OPT's way: the number of heads is an attribute, what is left over goes to the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4

    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self.num_heads, self.width_of_head).transpose(1, 2)


class ShortNames(Attention):
    """Fewer keys than queries; the numbers of both are attributes, by letters."""

    def __init__(self) -> None:
        super().__init__(heads=8, kv_heads=2)
        self.h, self.kv, self.d = 8, 2, self.width_of_head
        del self.width_of_head

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, self.h, self.d).transpose(1, 2)
        k = self.k(x).view(b, t, self.kv, self.d).transpose(1, 2)
        v = self.v(x).view(b, t, self.kv, self.d).transpose(1, 2)
        k, v = (each.repeat_interleave(self.h // self.kv, 1) for each in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.o(mixed.transpose(1, 2).reshape(b, t, self.h * self.d))
        return x + out


class CountedGroups(Attention):
    """Llama's way: how many queries share a key, and how many keys there are, are attributes."""

    def __init__(self) -> None:
        super().__init__(heads=8, kv_heads=2)
        self.num_key_value_groups, self.num_key_value_heads = 4, 2

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.num_key_value_heads, self.width_of_head)
        q, k, v = self.heads(self.q(x)), self.k(x).view(shape), self.v(x).view(shape)
        k, v = (t.repeat_interleave(self.num_key_value_groups, 2).transpose(1, 2) for t in (k, v))
        mixed = self.scores(q, k).softmax(-1) @ v
        out: Tensor = self.o(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))
        return x + out


class NormedHeads(Attention):
    """Qwen3's way: one norm for all heads, whole on every rank, used by split heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm = nn.LayerNorm(WIDTH // 4)

    def heads(self, x: Tensor) -> Tensor:
        actual: Tensor = self.q_norm(super().heads(x))
        return actual


class Masked(Attention):
    """A scale of queries that all heads share, and a mask that hides where it is not 0."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH // 4))
        self.hidden: Tensor | None = None

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        assert self.hidden is not None
        return super().scores(q * self.scale, k).masked_fill(self.hidden != 0, -1e9)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        self.hidden = hidden
        return super().forward(x)


class WithMask(nn.Module):
    """A causal mask of numbers or of booleans."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.blocks = kind, nn.ModuleList([Masked()])

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ones(x.shape[1], x.shape[1]).triu(1)
        if self.kind == "boolean":
            hidden = hidden.bool()
        out: Tensor = self.blocks[0](x, hidden=hidden)
        return out


class Alibi(Attention):
    """BLOOM's way: every head has a slope of its own, by its number."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=q.dtype).view(1, -1, 1, 1)
        return super().scores(q, k) + slopes * torch.arange(k.shape[2])


class RelativeBias(Attention):
    """T5's way: a table of distances with a column for every head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        places = torch.arange(q.shape[2])
        distance = (places[:, None] - places[None]).clamp(-4, 3) + 4
        return super().scores(q, k) + self.table(distance).permute(2, 0, 1)


class FusedHeads(nn.Module):
    """GPT-2's way: query, key and value side by side in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.view(*x.shape[:2], -1, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.o(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))
        return x + out


class Cache:
    """A cache that blocks write their keys to. It begins with a tensor; results follow."""

    def __init__(self) -> None:
        self.begin = torch.tensor(0)
        self.keys: dict[int, Tensor] = {}


class LockedCache(Cache):
    """One that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = Lock()


class Caching(Attention):
    """Keys of an earlier call come before those of this one."""

    layer_idx = 0

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        if cache is None:
            return super().forward(x)
        keys = self.k(x)
        before = cache.keys.get(self.layer_idx)
        cache.keys[self.layer_idx] = keys if before is None else torch.cat([before, keys], 1)
        mixed = (self.heads(self.q(x)) @ self.heads(cache.keys[self.layer_idx]).mT).softmax(-1)
        out: Tensor = self.o((mixed @ self.heads(self.v(x))).transpose(1, 2).flatten(2))
        return x + out


class CachingStack(nn.Module):
    """Blocks that share one cache, new in every forward."""

    def __init__(self, kind: type[Cache] = Cache) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList([Caching(), Caching()])
        for number, block in enumerate(self.blocks):
            block.layer_idx = number  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        cache = self.kind()
        for block in self.blocks:
            x = block(x, cache)
        return x


class Direct(nn.Module):
    """A layer whose weight is also used without its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 64)
        self.down = nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).relu()) + self.up.weight.mean()
        return out


class Stack(nn.Module):
    """Blocks, so that each is a unit."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x
