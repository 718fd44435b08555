"""A GPT whose attention hard-codes its number of heads, so that they cannot be split."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from advisor.inputs.bundled import gpt
from profiles.capture.batch.call import Batch, LossFn

SHAPE = gpt.GPTConfig(vocab_size=128, context=16, num_layers=2, num_heads=4, width=32)


class Attention(gpt.Attention):
    """Attention as in nanoGPT: the width of a head is the whole width over the number of heads."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, 4, width // 4)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


def build() -> tuple[nn.Module, Batch, LossFn]:
    model = gpt.GPT(SHAPE)
    for block in model.blocks:
        block.attention.__class__ = Attention  # type: ignore[assignment]
    ids = torch.arange(2 * 16).reshape(2, 16)
    return model.eval(), (ids, ids), gpt.loss
