"""A small decoder whose code asks no tensor how wide it was: every layer of it can be split."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiles.capture.batch.call import Batch

HEAD = 8


class Attention(nn.Module):
    """Queries share keys and values in pairs, as Llama's do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, n) for n in (width, width // 2, width // 2))
        self.q_norm = nn.LayerNorm(HEAD)
        self.o = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).view(*x.shape[:2], -1, HEAD).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        q = self.q_norm(q)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        attended: Tensor = self.o(out.transpose(1, 2).flatten(2))
        return attended


class FeedForward(nn.Module):
    """Gated, as Llama's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Experts(nn.Module):
    """Stacked experts in the form of transformers, two products of each."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(torch.randn(count, width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(count, width, width) / width**0.5)

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        inner = F.silu(torch.einsum("nh,nkho->nko", tokens, self.up[chosen]))
        made = torch.einsum("nkh,nkho->nko", inner, self.down[chosen])
        return (made * weights[..., None]).sum(1)


class Mixture(nn.Module):
    """Sends every token to two experts."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(count, width) / width**0.5)
        self.experts = Experts(count, width)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = F.linear(x, self.router).softmax(-1).flatten(0, 1).topk(2)
        mixed: Tensor = self.experts(x.flatten(0, 1), chosen, weights)
        return mixed.view_as(x)


class Block(nn.Module):
    def __init__(self, width: int, experts: int = 0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.feed_forward = Mixture(experts, width) if experts else FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.feed_forward(self.norm2(x))
        return out


class Decoder(nn.Module):
    """Token ids (B, T) to logits (B, T, V); `tied`: the head's weight is the embedding's;
    `experts`: of every block's feed-forward, 0: one for all tokens."""

    def __init__(
        self,
        *,
        vocabulary: int = 256,
        width: int = 128,
        layers: int = 4,
        tied: bool = False,
        experts: int = 0,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, experts) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def batch_of(rows: int, *, tokens: int = 16, vocabulary: int = 256) -> Batch:
    """Ids and the ids that follow."""
    ids = torch.randint(0, vocabulary, (rows, tokens + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
