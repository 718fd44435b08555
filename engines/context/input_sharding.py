"""Inputs of a model that runs over a rank's own tokens, and the weight of the rank's loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from engines.context.tokens import part, places
from engines.data.loss_rule import LossParts, weight_of
from profiles.capture.batch.call import Batch
from profiles.capture.batch.tree import batch_items, batch_tensors, describe, map_batch
from profiles.errors import BatchError
from profiles.record import Record

IGNORED = -100
"""Targets that losses leave out: `ignore_index` of torch's cross-entropy."""


class InputSharding(Record):
    """The inputs with which a model runs over a part of the tokens; `proof` finds the right ones.

    Attributes:
        gives_positions: it takes `position_ids`; else it counts tokens itself, and `OwnTokens`
            gives it the positions.
        gives_mask: it takes an `attention_mask`, and is given one that masks nothing: without it
            transformers takes gaps in the positions for the start of another sequence.
        shifts_labels: its loss compares a token with the label after it, which may be another
            rank's: it is given `shift_labels`, shifted before they are sharded.
        has_target: the last element of a tuple is for the loss.
    """

    gives_positions: bool
    gives_mask: bool
    shifts_labels: bool
    has_target: bool

    def part(
        self, batch: Batch, *, rank: int, size: int
    ) -> tuple[Batch, dict[str, Tensor], Tensor | None]:
        """The rank's tokens of a batch, further keyword arguments, and the positions of the tokens
        where the model counts them itself."""
        length = length_of(batch)
        first = batch_tensors(batch)[0]
        where = places(length, rank=rank, size=size, device=first.device)
        own = map_batch(
            lambda t: part(t, rank=rank, size=size) if has_tokens(t, length) else t, batch
        )
        keywords: dict[str, Tensor] = {}
        if self.gives_positions:
            keywords["position_ids"] = where.expand(len(first), -1)
        if self.gives_mask:
            keywords["attention_mask"] = torch.ones(
                len(first), len(where), dtype=torch.int64, device=first.device
            )
        if self.shifts_labels and isinstance(batch, Mapping) and "labels" in batch:
            keywords["shift_labels"] = part(_shifted(batch["labels"]), rank=rank, size=size)
        return own, keywords, None if self.gives_positions else where

    def shares(self, batch: Batch, rule: LossParts, *, size: int) -> Tensor:
        """Weights of the ranks' losses in the loss over all tokens: fp32, (size)."""
        device = batch_tensors(batch)[0].device
        weight = weight_of(rule.terms)
        if rule.is_sum or weight is None:
            return torch.full((size,), 1.0 if rule.is_sum else 1 / size, device=device)
        assert rule.terms is not None
        pieces = self.counted(batch, size=size, name=rule.terms.name)
        counts = torch.stack([torch.as_tensor(weight(piece), device=device) for piece in pieces])
        total = counts.sum()
        return (counts / torch.where(total > 0, total, 1)).float()

    def counted(
        self, batch: Batch, *, size: int, name: str | None = None
    ) -> list[dict[str, Tensor]]:
        """Of every rank, its part of the tensors by name, or of the one of `name`: what its loss
        may be a mean over."""
        length = length_of(batch)
        named = {n: value for n, value in batch_items(batch) if isinstance(value, Tensor)}
        if self.shifts_labels:
            named["shift_labels"] = _shifted(named["labels"])
        if name is not None:
            named = {n: value for n, value in named.items() if n == name}
        return [
            {
                n: part(value, rank=rank, size=size) if has_tokens(value, length) else value
                for n, value in named.items()
            }
            for rank in range(size)
        ]


def length_of(batch: Batch) -> int:
    """Tokens of a sequence: the second dimension of the first tensor that has one.

    Raises:
        BatchError: there is none.
    """
    for tensor in batch_tensors(batch):
        if tensor.dim() >= 2:
            return tensor.shape[1]
    raise BatchError(
        f"the batch has no sequence that could be sharded ({describe(batch)})",
        hints=["its second dimension is the tokens; set cp=1 for others"],
    )


def has_tokens(tensor: Tensor, length: int) -> bool:
    """True if the second dimension of a tensor is the tokens."""
    return tensor.dim() >= 2 and tensor.shape[1] == length


def _shifted(labels: Tensor) -> Tensor:
    """The label of the token after each."""
    return pad(labels, (0, 1), value=IGNORED)[:, 1:]
