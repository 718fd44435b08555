"""Logits that stay split over the vocabulary until the loss.

Whole logits in fp32 are often the largest tensors of a language model. The loss needs of them one
maximum, one sum and one entry a token, and one sum more where labels are smoothed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from engines.blocks.chunked_loss import ChunkedLogits
from engines.blocks.logits import AskedLoss, UnmadeLogits, whole_tensors
from engines.state.slices import Slice, share
from engines.tensor.collectives import Collectives, GroupCollectives
from profiles.torch_compat import wrapper_tensor
from profiles.torch_compat.logits import RESHAPES, sizes_of

_LAST = Slice(-1)


class VocabLogits(UnmadeLogits):
    """Logits (..., vocabulary) that look whole, of which this rank has a part.

    The part may itself be made a chunk of the tokens at a time.
    """

    part: Tensor
    collectives: Collectives

    @classmethod
    def of(cls, part: Tensor, collectives: Collectives, *, length: int) -> Self:
        """Args:
        part: (..., share of this rank).
        length: of the vocabulary.
        """
        logits = wrapper_tensor(cls, (*part.shape[:-1], length), part)
        logits.part, logits.collectives = part, collectives
        return logits

    def whole(self) -> Tensor:
        """The whole logits, gathered; all ranks call it."""
        part = whole_tensors(self.part)
        return self.collectives.gather(part, _LAST, length=self.shape[-1])

    def _made_for(self, func: Callable[..., Any]) -> Tensor:
        if isinstance(self.part, UnmadeLogits):
            part = self.part._made_for(func)
            return self.collectives.gather(part, _LAST, length=self.shape[-1])
        return self.whole()

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"VocabLogits({tuple(self.shape)}, {self.part.shape[-1]} of the vocabulary here)"

    def _read(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        return func(self.part, *args, **kwargs)

    def _applied(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Self:
        if func in RESHAPES:  # asked for in whole numbers, the last of them the vocabulary
            shape = [*sizes_of(args)[:-1], self.part.shape[-1]]
            result = self.part.reshape(shape)
        else:
            result = func(self.part, *args, **kwargs)
        return type(self).of(result, self.collectives, length=self.shape[-1])

    def _loss(self, asked: AskedLoss) -> Tensor | None:
        if not asked.is_of_classes:
            return None
        target, length = asked.target, self.shape[-1]
        is_counted = target != asked.ignore_index
        here = torch.where(is_counted, target, 0)

        def losses(part: Tensor, rows: slice) -> Tensor:
            own = _token_losses(part, here[rows], asked, self.collectives, length=length)
            return torch.where(is_counted[rows], own, 0.0)

        if isinstance(self.part, ChunkedLogits):
            if asked.reduction == "none":
                return None
            total = self.part.sum_of(lambda part, rows: losses(part, rows).sum())
        else:
            each = losses(self.part, slice(None))
            if asked.reduction == "none":
                return each
            total = each.sum()
        return total if asked.reduction == "sum" else total / asked.terms()


def _token_losses(
    part: Tensor, target: Tensor, asked: AskedLoss, collectives: Collectives, *, length: int
) -> Tensor:
    """log(sum(exp(logits))) - logits[target], (tokens,), from parts (tokens, share); by the weight
    of the target, and smoothed by the weighted mean of that over all classes."""
    start, _ = share(length, collectives.rank, collectives.size)
    here = target - start
    is_mine = (here >= 0) & (here < part.shape[-1])
    # The same number for all: it cancels out, and so needs no gradient.
    highest = part.detach().amax(-1) if part.shape[-1] else part.new_full(target.shape, -math.inf)
    if isinstance(collectives, GroupCollectives):
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=collectives.group)
    shifted = part - highest[:, None]
    total = collectives.reduce(shifted.exp().sum(-1)).log()
    picked = torch.where(is_mine, _pick(shifted, torch.where(is_mine, here, 0)), 0.0)
    losses: Tensor = total - collectives.reduce(picked)
    weight, smoothing = asked.weight, asked.label_smoothing
    if weight is not None:
        losses = losses * weight[target]
    if not smoothing:
        return losses
    every = shifted if weight is None else shifted * weight[start : start + part.shape[-1]]
    weights = length if weight is None else weight.sum()
    of_all = total * weights - collectives.reduce(every.sum(-1))
    return (1 - smoothing) * losses + smoothing / length * of_all


def _pick(rows: Tensor, columns: Tensor) -> Tensor:
    if not rows.shape[-1]:
        return rows.sum(-1)
    return rows.gather(-1, columns[:, None]).squeeze(-1)
