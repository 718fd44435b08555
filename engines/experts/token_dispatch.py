"""All-to-all of tokens to the ranks of their experts, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engines.runtime.mesh import Axis


def dispatch(
    hidden: Tensor, experts: Tensor, *, axis: Axis, each: int, compute: Callable[..., Tensor]
) -> Tensor:
    """Outputs of experts on any rank of the axis for this rank's tokens; all ranks of it call it.

    Args:
        hidden: tokens, (N, H).
        experts: the number of one expert for each, int64 (N).
        each: experts of a rank: rank r holds those from r * each.
        compute: compute(tokens (M, H), numbers of own experts (M)) -> (M, H), of this rank's.

    Returns (N, H).
    """
    owner = experts // each
    order = owner.argsort(stable=True)
    sent = torch.bincount(owner, minlength=axis.size)
    received = sent.clone()  # alone, in a fake world, a rank gets as many tokens as it sends
    dist.all_to_all_single(received, sent, group=axis.group)
    to_others, to_here = sent.tolist(), received.tolist()
    tokens = _all_to_all_rows(hidden[order], to_others, to_here, axis)
    numbers = torch.empty(sum(to_here), dtype=experts.dtype, device=experts.device)
    dist.all_to_all_single(
        numbers, (experts % each)[order].contiguous(), to_here, to_others, group=axis.group
    )
    computed = compute(tokens, numbers) if len(tokens) else tokens
    # Every rank takes part in the backward, also one whose experts got no token.
    back = _all_to_all_rows(_Tied.apply(computed, tokens), to_here, to_others, axis)  # type: ignore[no-untyped-call]
    return torch.empty_like(back).index_copy(0, order, back)


def _all_to_all_rows(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], axis: Axis
) -> Tensor:
    result: Tensor = _AllToAll.apply(rows, sent, received, axis)  # type: ignore[no-untyped-call]
    return result


class _AllToAll(torch.autograd.Function):
    """Rows for each rank of the group, one after another, and from each; gradients go back."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        axis: Axis,
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.axis = sent, received, axis
        return _all_to_all(rows, sent, received, axis.group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        rows = _all_to_all_rows(gradients[0], ctx.received, ctx.sent, ctx.axis)
        return rows, None, None, None


def _all_to_all(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None
) -> Tensor:
    result = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), list(received), list(sent), group=group)
    return result


class _Tied(torch.autograd.Function):
    """The first tensor, with the second in the graph of gradients: both have a way back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, other: Tensor) -> Tensor:
        ctx.is_same = tensor is other
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        zeros = torch.zeros_like(gradients[0])
        return (None, zeros) if ctx.is_same else (gradients[0], zeros)
