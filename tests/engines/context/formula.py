"""Attention by its formula, for kernels and rings to be compared with."""

from __future__ import annotations

import torch
from torch import Tensor


def written_out(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> Tensor:
    """Attention by its formula."""
    scores = q @ k.transpose(2, 3) * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(3) @ v
