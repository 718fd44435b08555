"""Plain torch models of the matrix: each deep enough for four stages, dropout off."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 32
VOCABULARY = 61
CLASSES = 10


class Mlp(nn.Module):
    """Images (B, 1, 16, 16) to classes; linear layers and activations in one `Sequential`."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(256, WIDTH)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in "1234")
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.enter(x.flatten(1))))
        return out


class Translator(nn.Module):
    """`nn.Transformer` between embeddings and a head: ids (B, S) and (B, T) to logits (B, T, V)."""

    causal: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = (nn.Embedding(VOCABULARY, WIDTH) for _ in range(2))
        self.transformer = nn.Transformer(
            WIDTH, 4, 4, 4, dim_feedforward=64, dropout=0.0, batch_first=True
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("causal", nn.Transformer.generate_square_subsequent_mask(12))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        seen = self.transformer(
            self.source(source), self.target(target), tgt_mask=self.causal, tgt_is_causal=True
        )
        logits: Tensor = self.head(seen)
        return logits


class LstmLanguageModel(nn.Module):
    """Ids (B, T) to logits (B, T, V) through residual LSTM layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)[0]
        logits: Tensor = self.head(x)
        return logits


def _convolutions(taken: int, given: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(taken, given, 3, padding=1, bias=False),
        nn.GroupNorm(4, given),
        nn.ReLU(inplace=True),
        nn.Conv2d(given, given, 3, padding=1),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Images (B, 1, 16, 16) to a class of every pixel; each level skips over the bottom."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_convolutions(1, 8), _convolutions(8, 16)])
        self.pool = nn.MaxPool2d(2)
        self.bottom = _convolutions(16, 32)
        self.widen = nn.ModuleList(
            [nn.ConvTranspose2d(32, 16, 2, stride=2), nn.ConvTranspose2d(16, 8, 2, stride=2)]
        )
        self.up = nn.ModuleList([_convolutions(32, 16), _convolutions(16, 8)])
        self.leave = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for level in self.down:
            x = level(x)
            skipped.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for widen, level in zip(self.widen, self.up, strict=True):
            x = level(torch.cat([widen(x), skipped.pop()], 1))
        out: Tensor = self.leave(x)
        return out


class Experts(nn.Module):
    """Each token goes through the best two of four MLPs, weighed by the router."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        best, chosen = self.router(y).softmax(-1).topk(2)
        weights = torch.zeros(*y.shape[:-1], 4).scatter(-1, chosen, best)
        for number, expert in enumerate(self.experts):
            x = x + weights[..., number, None] * expert(y)
        return x


class MixtureOfExperts(nn.Module):
    """Ids (B, T) to logits (B, T, V): attention and experts by turns, head tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(4)
        )
        self.layers = nn.ModuleList(Experts() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        for attention, layer in zip(self.attention, self.layers, strict=True):
            x = layer(x + attention(x, x, x, attn_mask=later, need_weights=False)[0])
        logits: Tensor = self.head(self.norm(x))
        return logits


class SiameseNet(nn.Module):
    """Two images (B, 1, 16, 16) through one trunk, then compared; a table of its own between."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(_convolutions(1 if not n else 8, 8) for n in range(4))
        self.table = nn.Parameter(torch.randn(8) * 0.1)
        self.compare = nn.Linear(16, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        both = torch.cat([self._seen(left), self._seen(right)], 1)
        out: Tensor = self.head(F.relu(self.compare(both)))
        return out

    def _seen(self, x: Tensor) -> Tensor:
        for level in self.trunk:
            x = level(x)
        return x.mean((2, 3)) + self.table
