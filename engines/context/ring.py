"""Ring attention: keys and values pass by every rank, queries stay (arXiv:2310.01889).

In step s a rank has the keys of rank - s. The attention to them is merged with that of earlier
steps by log-sum-exp: the result is that of one softmax over all keys. The backward is a second
round; the gradients of keys and values follow one step behind them and end at their owner.

With causal attention and the two chunks of `tokens` all ranks compute equally much in every step:
of an earlier rank's keys all queries attend to the first chunk alone, of a later rank's keys the
second half of the queries attends to both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from engines.runtime.mesh import Axis
from profiles.torch_compat.attention import attend, attend_backward

_ALL = slice(None)
# Of messages with keys and values, and of those with their gradients.
_VALUES, _GRADIENTS = 1, 2


class Ring:
    """The ranks of an axis, each sending to the next."""

    def __init__(self, axis: Axis) -> None:
        self.rank, self.size = axis.position, axis.size
        self._group = axis.group

    def pass_on(self, tensor: Tensor, tag: int) -> Callable[[], Tensor]:
        """Start to send `tensor` to the next rank; the result waits for the previous rank's."""
        received = torch.empty_like(tensor)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, group=self._group, group_peer=after, tag=tag),
                dist.P2POp(dist.irecv, received, group=self._group, group_peer=before, tag=tag),
            ]
        )

        def arrived() -> Tensor:
            for work in works:
                work.wait()
            return received

        return arrived

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
    ) -> Tensor:
        """Attention of this rank's queries to the keys of all ranks; all ranks call it.

        Shapes: query (B, H, T, E), key (B, G, T, E), value (B, G, T, F), where H is a multiple of
        G and T an even number of tokens, a `tokens.part` of the sequence. Returns (B, H, T, F).
        """
        result: Tensor = _RingAttention.apply(query, key, value, self, is_causal, scale)  # type: ignore[no-untyped-call]
        return result


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ring: Ring,
        is_causal: bool,
        scale: float,
    ) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros(*query.shape[:3], value.shape[3], dtype=wide)
        lse = query.new_full(query.shape[:3], -torch.inf, dtype=wide)
        message = _packed(key, value)
        for step in range(ring.size):
            is_last = step == ring.size - 1
            arriving = None if is_last else ring.pass_on(message, _VALUES)
            rows, columns, is_own = _visible(ring, step, query.shape[2], is_causal)
            k, v = (_for_heads(t[:, :, columns], query) for t in _unpacked(message, key, value))
            partial = attend(query[:, :, rows], k, v, is_causal=is_own, scale=scale)
            _merge(out[:, :, rows], lse[:, :, rows], *partial)
            message = arriving() if arriving is not None else message
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.ring, ctx.is_causal, ctx.scale = ring, is_causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        gradient = gradients[0].contiguous()
        of_query = torch.zeros_like(query, dtype=lse.dtype)
        message = _packed(key, value)
        sums = torch.zeros_like(message, dtype=lse.dtype)
        following: Callable[[], Tensor] | None = None
        for step in range(ring.size):
            is_last = step == ring.size - 1
            arriving = None if is_last else ring.pass_on(message, _VALUES)
            rows, columns, is_own = _visible(ring, step, query.shape[2], ctx.is_causal)
            k, v = (_for_heads(t[:, :, columns], query) for t in _unpacked(message, key, value))
            g, q, o, lse_of = (t[:, :, rows] for t in (gradient, query, out, lse))
            partial = attend_backward(g, q, k, v, o, lse_of, is_causal=is_own, scale=ctx.scale)
            of_query[:, :, rows] += partial[0]
            sums = following() if following is not None else sums
            for total, share in zip(_unpacked(sums, key, value), partial[1:], strict=True):
                total[:, :, columns] += _over_heads(share, total)
            following = ring.pass_on(sums, _GRADIENTS)
            message = arriving() if arriving is not None else message
        assert following is not None
        of_key, of_value = _unpacked(following(), key, value)
        return (
            of_query.to(query.dtype),
            of_key.to(key.dtype),
            of_value.to(value.dtype),
            None,
            None,
            None,
        )


def _visible(ring: Ring, step: int, tokens: int, is_causal: bool) -> tuple[slice, slice, bool]:
    """The rank's queries that attend to keys of this step, those keys, and True if attention is
    causal among them."""
    source = (ring.rank - step) % ring.size
    if not is_causal or step == 0:
        return _ALL, _ALL, is_causal
    if source < ring.rank:
        return _ALL, slice(tokens // 2), False
    return slice(tokens // 2, None), _ALL, False


def _merge(out: Tensor, lse: Tensor, new: Tensor, new_lse: Tensor) -> None:
    """Merge the attention to further keys in place, as one softmax over all of them."""
    both = torch.logaddexp(lse, new_lse)
    out.mul_((lse - both).exp()[..., None])
    out.add_(new.to(out.dtype) * (new_lse - both).exp()[..., None])
    lse.copy_(both)


def _packed(key: Tensor, value: Tensor) -> Tensor:
    """Both in one message."""
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _unpacked(message: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a message, in the shapes of the rank's own."""
    first, second = message.split([key.numel(), value.numel()])
    return first.view(key.shape), second.view(value.shape)


def _for_heads(shared: Tensor, query: Tensor) -> Tensor:
    """Keys or values of a group of heads, once for each head of the query."""
    times = query.shape[1] // shared.shape[1]
    return shared.repeat_interleave(times, 1) if times > 1 else shared


def _over_heads(gradient: Tensor, shared: Tensor) -> Tensor:
    """The sum over the heads of each group."""
    groups = shared.shape[1]
    return gradient.unflatten(1, (groups, -1)).sum(2) if gradient.shape[1] != groups else gradient
