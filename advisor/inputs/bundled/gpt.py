"""A small GPT in plain PyTorch: the demo's model, and the architecture of bundled names.

Shapes in comments: B samples, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from advisor.inputs.bundled.gpt_shapes import GPTConfig as GPTConfig


class Attention(nn.Module):
    """Causal self-attention: every token looks at itself and at those before it.

    The width of a head is fixed and their number is not, so a rank can compute its share of them.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.num_heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, 3, -1, self.head_width)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()  # each B, heads, T, D / heads
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class Block(nn.Module):
    """One layer: attention and MLP, each normalised before and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x


class GPT(nn.Module):
    """Token ids (B, T) to logits (B, T, V): learned positions, pre-norm, a tied head.

    >>> model = GPT(GPTConfig(vocab_size=16, context=8, num_layers=1, num_heads=2, width=4))
    >>> tuple(model(torch.zeros(2, 8, dtype=torch.long)).shape)
    (2, 8, 16)
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        self._initialise()

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _initialise(self) -> None:
        """GPT-2's: N(0, 0.02), and the last matrix of each branch smaller by sqrt(2 L).

        Radford et al. 2019, section 2.3: so that the sum of 2 L branches keeps its scale.
        """
        branch = 0.02 / math.sqrt(2 * self.config.num_layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                last = name.endswith(("attention.out", "mlp.2"))
                nn.init.normal_(module.weight, std=branch if last else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats of logits (B, T, V) against the ids (B, T) that come next."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
