"""Equal shares of the tokens of sequences that the ranks need not divide."""

from __future__ import annotations

import torch
from torch import Tensor

from profiles.errors import BatchError


def require_tokens(whole: Tensor, size: int) -> None:
    """Raises:
    BatchError: there is no token for every rank.
    """
    tokens = whole.shape[1] if whole.dim() > 1 else 0
    if tokens < size:
        raise BatchError(
            f"a sequence of {tokens} tokens cannot be split over {size} ranks",
            hints=["take longer sequences, or set sequence_parallel=false"],
        )


def note_length(lengths: dict[int, int], tokens: int, size: int) -> int:
    """Note the length of a whole sequence by that of a share, which is returned.

    Raises:
        BatchError: another sequence, of another length, has such shares: where they are gathered,
            nothing says which it is.
    """
    each = -(-tokens // size)
    before = lengths.setdefault(each, tokens)
    if before != tokens:
        raise BatchError(
            f"sequences of {before} and of {tokens} tokens cannot both be split over {size} ranks:"
            f" shares of both have {each}",
            hints=[f"pad both to {each * size}, or set sequence_parallel=false"],
        )
    return each


def padded(whole: Tensor, size: int) -> Tensor:
    """`whole` (rows, tokens, ...) with its last token repeated until `size` divides the tokens."""
    missing = -whole.shape[1] % size
    if not missing:
        return whole
    return torch.cat([whole, whole[:, -1:].expand(-1, missing, *whole.shape[2:])], dim=1)
