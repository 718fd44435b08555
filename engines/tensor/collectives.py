"""Collectives of split layers, with their gradients.

A backward is the collective that answers the forward's (of a `copy` a `reduce`, of a `gather` a
`scatter`), so that gradients of gradients are those of one process: penalties on the gradient of an
input, forces that are learnt.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engines.state.slices import Slice, share
from engines.state.token_shares import note_length, padded
from profiles.torch_compat import all_gather_single, reduce_scatter_single

SEQUENCE = Slice(1)
"""Tokens are the second dimension: (rows, tokens, features)."""


class Collectives(Protocol):
    """Megatron's collectives among `size` ranks: copy, reduce and gather of features
    (arXiv:1909.08053), and those of its sequence parallelism (arXiv:2205.05198)."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def copy(self, whole: Tensor) -> Tensor:
        """`whole` as it is; gradients of all ranks are summed."""
        ...

    def reduce(self, partial: Tensor) -> Tensor:
        """The sum over all ranks; every rank gets the whole gradient. May overwrite `partial`."""
        ...

    def gather(self, part: Tensor, cut: Slice, *, length: int) -> Tensor:
        """The whole of `length` along `cut.dim`; a rank's gradient is its part of the whole one."""
        ...

    def scatter(self, whole: Tensor, cut: Slice) -> Tensor:
        """This rank's part of what all have whole; the gradient is gathered from all ranks."""
        ...

    def split_tokens(self, whole: Tensor) -> Tensor:
        """This rank's tokens; the gradient is gathered from all ranks."""
        ...

    def gather_tokens(self, part: Tensor) -> Tensor:
        """All tokens; a rank's gradient is its part of the whole one."""
        ...

    def join_tokens(self, part: Tensor) -> Tensor:
        """All tokens, in place of a `copy`: gradients of all ranks are summed."""
        ...

    def reduce_tokens(self, partial: Tensor) -> Tensor:
        """This rank's tokens of the sum over all ranks, in place of a `reduce`."""
        ...


class GroupCollectives:
    """Collectives among the ranks of a process group.

    Shares of tokens are equal. A sequence that the ranks do not divide is padded: its last token is
    repeated, which no code finds odd, and the copies are taken off where tokens are gathered, so
    that they have no gradient.

    Args:
        lengths: of whole sequences by the length of a share, where others keep them; else they are
            those of the forward.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, *, lengths: dict[int, int] | None = None
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._lengths = {} if lengths is None else lengths

    def begin_forward(self) -> None:
        """Forget the sequences of the forward before."""
        self._lengths.clear()

    def copy(self, whole: Tensor) -> Tensor:
        return _apply(_Copy, whole, self.group)

    def reduce(self, partial: Tensor) -> Tensor:
        return _apply(_Reduce, partial, self.group)

    def gather(self, part: Tensor, cut: Slice, *, length: int) -> Tensor:
        return _apply(_Gather, part, cut, length, self)

    def scatter(self, whole: Tensor, cut: Slice) -> Tensor:
        return _apply(_Scatter, whole, cut, self)

    def split_tokens(self, whole: Tensor) -> Tensor:
        return _apply(_SplitTokens, self._padded(whole), self)

    def gather_tokens(self, part: Tensor) -> Tensor:
        every = self.gather(part, SEQUENCE, length=part.shape[1] * self.size)
        return self._without_padding(every, part)

    def join_tokens(self, part: Tensor) -> Tensor:
        return self._without_padding(_apply(_JoinTokens, part, self), part)

    def reduce_tokens(self, partial: Tensor) -> Tensor:
        return _apply(_ReduceTokens, self._padded(partial), self)

    def _padded(self, whole: Tensor) -> Tensor:
        """
        Raises:
            BatchError: see `note_length`.
        """
        note_length(self._lengths, whole.shape[1], self.size)
        return padded(whole, self.size)

    def _without_padding(self, every: Tensor, part: Tensor) -> Tensor:
        tokens = self._lengths.get(part.shape[1], every.shape[1])
        return every if tokens == every.shape[1] else every[:, :tokens].contiguous()


def _apply(function: type[torch.autograd.Function], *args: object) -> Tensor:
    result: Tensor = function.apply(*args)
    return result


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        own = gradients[0].clone(memory_format=torch.contiguous_format)  # others may refer to it
        return _apply(_Reduce, own, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = partial.detach().contiguous()  # a product, which its own backward does not need
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if not torch.is_grad_enabled():
            return gradients[0], None
        return _apply(_Copy, gradients[0], ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, cut: Slice, length: int, ranks: GroupCollectives) -> Tensor:
        ctx.cut, ctx.ranks = cut, ranks
        return all_gather(part, cut, length=length, ranks=ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        if torch.is_grad_enabled():
            return _apply(_Scatter, gradients[0], ctx.cut, ctx.ranks), None, None, None
        mine = ctx.cut.part(gradients[0], rank=ctx.ranks.rank, size=ctx.ranks.size)
        return mine, None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, cut: Slice, ranks: GroupCollectives) -> Tensor:
        ctx.cut, ctx.ranks, ctx.length = cut, ranks, whole.shape[cut.dim]
        # A copy: a view would keep the whole for the backward.
        return cut.part(whole, rank=ranks.rank, size=ranks.size).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        every = _apply(_Gather, gradients[0], ctx.cut, ctx.length, ctx.ranks)
        return every, None, None


class _SplitTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: GroupCollectives) -> Tensor:
        ctx.ranks = ranks
        # A copy: a view would keep the whole for the backward.
        return SEQUENCE.part(whole, rank=ranks.rank, size=ranks.size).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        part, ranks = gradients[0], ctx.ranks
        return _apply(_Gather, part, SEQUENCE, part.shape[1] * ranks.size, ranks), None


class _JoinTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: GroupCollectives) -> Tensor:
        ctx.ranks = ranks
        return _all_tokens(part, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _apply(_ReduceTokens, gradients[0], ctx.ranks), None


class _ReduceTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, ranks: GroupCollectives) -> Tensor:
        ctx.ranks = ranks
        return _summed_tokens(partial.detach(), ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _apply(_JoinTokens, gradients[0], ctx.ranks), None


def _all_tokens(part: Tensor, ranks: GroupCollectives) -> Tensor:
    return all_gather(part, SEQUENCE, length=part.shape[1] * ranks.size, ranks=ranks)


def _summed_tokens(whole: Tensor, ranks: GroupCollectives) -> Tensor:
    tokens_first = whole.movedim(1, 0).contiguous()
    mine = tokens_first.new_empty(len(tokens_first) // ranks.size, *tokens_first.shape[1:])
    reduce_scatter_single(mine, tokens_first, group=ranks.group)
    return mine.movedim(0, 1).contiguous()


def all_gather(part: Tensor, cut: Slice, *, length: int, ranks: GroupCollectives) -> Tensor:
    """The whole of the ranks' parts, `length` along `cut.dim`, without a gradient.

    Smaller shares are sent padded: a collective has one size.
    """
    lengths = [
        share(length // cut.packs, rank, ranks.size)[1] * cut.packs for rank in range(ranks.size)
    ]
    longest = max(lengths)
    first = part.detach().movedim(cut.dim, 0)
    if first.shape[0] < longest:
        padding = first.new_zeros(longest - first.shape[0], *first.shape[1:])
        first = torch.cat([first, padding])
    every = first.new_empty(longest * ranks.size, *first.shape[1:])
    all_gather_single(every, first.contiguous(), group=ranks.group)
    parts = [
        piece[:used].movedim(0, cut.dim)
        for piece, used in zip(every.split(longest), lengths, strict=True)
    ]
    return cut.whole(parts)
