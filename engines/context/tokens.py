"""The tokens of a rank: two chunks of a sequence, one from each end.

Where attention is causal the last tokens look at all others and the first ones at none. With four
chunks on two ranks, rank 0 has the first and the last, rank 1 the two in the middle: the same work.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """The numbers of a rank's chunks, of `2 * size`.

    >>> [chunks_of(rank, 2) for rank in range(2)]
    [(0, 3), (1, 2)]
    """
    return rank, 2 * size - 1 - rank


def part(whole: Tensor, *, rank: int, size: int, dim: int = 1) -> Tensor:
    """The tokens of `rank` of a tensor whose dimension `dim`, a multiple of 2 * size, is tokens."""
    chunks = whole.chunk(2 * size, dim)
    return torch.cat([chunks[number] for number in chunks_of(rank, size)], dim)


def joined(parts: Sequence[Tensor], *, dim: int = 1) -> Tensor:
    """All tokens in their order, from the parts of all ranks."""
    size = len(parts)
    chunks: list[Tensor] = [parts[0]] * (2 * size)
    for rank, own in enumerate(parts):
        for number, chunk in zip(chunks_of(rank, size), own.chunk(2, dim), strict=True):
            chunks[number] = chunk
    return torch.cat(chunks, dim)


def places(length: int, *, rank: int, size: int, device: torch.device) -> Tensor:
    """Positions of the rank's tokens in a sequence of `length` tokens: int64, (length / size)."""
    return part(torch.arange(length, device=device), rank=rank, size=size, dim=0)
