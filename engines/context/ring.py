"""Ring attention: keys and values pass by every rank, queries stay (arXiv:2310.01889).

In step s a rank has the keys of rank - s. What its queries find there is merged with what they
found before, by log-sum-exp: the result is that of one softmax over all keys. The backward goes
round again; the gradients of keys and values travel one step behind them and end at their owner.

With causal attention and the two chunks of `tokens` a rank computes as much as every other in every
step: of keys of an earlier rank it sees the first chunk alone, of a later rank's both, from the
second half of its queries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engines.runtime.mesh import Axis
from profiles.torch_compat_attention import attend, attend_backward

_ALL = slice(None)
# Of messages with keys and values, and of those with their gradients.
_VALUES, _GRADIENTS = 1, 2


class Ring:
    """The ranks of an axis, each sending to the next."""

    def __init__(self, axis: Axis) -> None:
        self.rank, self.size = axis.position, axis.size
        self._group = axis.group

    def pass_on(self, tensor: Tensor, tag: int) -> Callable[[], Tensor]:
        """Start to send `tensor` to the next rank; call the result for what the one before sent."""
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
        there = _packed(key, value)
        for step in range(ring.size):
            is_last = step == ring.size - 1
            coming = None if is_last else ring.pass_on(there, _VALUES)
            rows, columns, is_own = _sight(ring, step, query.shape[2], is_causal)
            k, v = (_for_heads(t[:, :, columns], query) for t in _unpacked(there, key, value))
            partial = attend(query[:, :, rows], k, v, is_causal=is_own, scale=scale)
            _merge(out[:, :, rows], lse[:, :, rows], *partial)
            there = coming() if coming is not None else there
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.ring, ctx.is_causal, ctx.scale = ring, is_causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        gradient = gradients[0].contiguous()
        of_query = torch.zeros_like(query, dtype=lse.dtype)
        there = _packed(key, value)
        sums = torch.zeros_like(there, dtype=lse.dtype)
        behind: Callable[[], Tensor] | None = None
        for step in range(ring.size):
            is_last = step == ring.size - 1
            coming = None if is_last else ring.pass_on(there, _VALUES)
            rows, columns, is_own = _sight(ring, step, query.shape[2], ctx.is_causal)
            k, v = (_for_heads(t[:, :, columns], query) for t in _unpacked(there, key, value))
            g, q, o, lse_of = (t[:, :, rows] for t in (gradient, query, out, lse))
            partial = attend_backward(g, q, k, v, o, lse_of, is_causal=is_own, scale=ctx.scale)
            of_query[:, :, rows] += partial[0]
            sums = behind() if behind is not None else sums
            for total, share in zip(_unpacked(sums, key, value), partial[1:], strict=True):
                total[:, :, columns] += _over_heads(share, total)
            behind = ring.pass_on(sums, _GRADIENTS)
            there = coming() if coming is not None else there
        assert behind is not None
        of_key, of_value = _unpacked(behind(), key, value)
        return (
            of_query.to(query.dtype),
            of_key.to(key.dtype),
            of_value.to(value.dtype),
            None,
            None,
            None,
        )


def _sight(ring: Ring, step: int, tokens: int, is_causal: bool) -> tuple[slice, slice, bool]:
    """The rank's queries that attend to which of the keys of this step, and
    whether each of them looks at those before it only."""
    source = (ring.rank - step) % ring.size
    if not is_causal or step == 0:
        return _ALL, _ALL, is_causal
    if source < ring.rank:
        return _ALL, slice(tokens // 2), False
    return slice(tokens // 2, None), _ALL, False


def _merge(out: Tensor, lse: Tensor, new: Tensor, found_lse: Tensor) -> None:
    """Add the attention to some more keys, in place; the weights of a softmax over all of them."""
    both = torch.logaddexp(lse, found_lse)
    out.mul_((lse - both).exp()[..., None])
    out.add_(new.to(out.dtype) * (found_lse - both).exp()[..., None])
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
