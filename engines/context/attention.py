"""The view of a forward on a rank with a part of the tokens: attention to all, true positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from profiles.errors import ModelError


class Attend(Protocol):
    """Attention of a rank's queries to the keys of all ranks; shapes as in `Ring.attention`."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
    ) -> Tensor: ...


class OwnTokens(TorchFunctionMode):
    """Inside, `scaled_dot_product_attention` is `attend`, whatever the model's code looks like.

    With `places`, code that counts tokens itself gets the positions of the rank's T tokens: for
     `torch.arange(T)`, and as rows of a parameter or buffer by position (`table[:T]`,
    `table[:, :T]`).

    Args:
        places: positions of the rank's tokens, int64 (T); None leaves counting as it is.
        model: its parameters and buffers may be tables by position.
    """

    def __init__(self, attend: Attend, *, places: Tensor | None, model: nn.Module) -> None:
        super().__init__()
        self._attend = attend
        self._places = places
        self._buffers = buffers_of(model) if places is not None else set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if self._places is not None:
            if func is torch.arange and counted_to(args, kwargs) == len(self._places):
                dtype, device = kwargs.get("dtype"), kwargs.get("device")
                return self._places.to(device=device or self._places.device, dtype=dtype)
            if func is Tensor.__getitem__ and is_table(args[0], self._buffers):
                return self._rows(args[0], args[1])
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        require_plain(query, key, attn_mask=attn_mask, dropout_p=dropout_p)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        device = query.device.type
        if torch.is_autocast_enabled(device):  # it casts what attention is given
            dtype = torch.get_autocast_dtype(device)
            query, key, value = (t.to(dtype) for t in (query, key, value))
        if query.dim() == 3:  # one head
            heads = (t.unsqueeze(1) for t in (query, key, value))
            return self._attend(*heads, is_causal=is_causal, scale=scale).squeeze(1)
        return self._attend(query, key, value, is_causal=is_causal, scale=scale)

    def _rows(self, table: Tensor, index: Any) -> Tensor:
        assert self._places is not None
        count = len(self._places)
        if count not in rows_taken(index):
            return table[index]
        places = self._places.to(table.device)
        many = index if isinstance(index, tuple) else (index,)
        return table[tuple(places if count in rows_taken(item) else item for item in many)]


class Counting(TorchFunctionMode):
    """Record the numbers that the code inside counts to, where `OwnTokens` would give positions.

    Over all tokens of a sequence it counts to their number. Where it also counts to the size of a
    rank's part, as a table of frequencies may by chance, that would be taken for positions.

    Attributes:
        counts: all of these numbers.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._buffers = buffers_of(model)
        self.counts: set[int] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.arange:
            count = counted_to(args, kwargs or {})
            self.counts |= {count} if count is not None else set()
        elif func is Tensor.__getitem__ and is_table(args[0], self._buffers):
            self.counts |= rows_taken(args[1])
        return func(*args, **(kwargs or {}))


def buffers_of(model: nn.Module) -> set[int]:
    """Ids of its buffers. Parameters are known by their type: FSDP2 replaces the objects."""
    return {id(buffer) for buffer in model.buffers()}


def is_table(tensor: Tensor, buffers: set[int]) -> bool:
    """True if it may have a row for each position."""
    return isinstance(tensor, nn.Parameter) or id(tensor) in buffers


def counted_to(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """The length of a `torch.arange` over integers from 0; None for any other call."""
    numbers = [*args, *(kwargs[name] for name in ("start", "end", "step") if name in kwargs)]
    match numbers:
        case [int(end)] | [0, int(end)] | [0, int(end), 1]:
            return end
    return None


def rows_taken(index: Any) -> set[int]:
    """The length of a leading slice: n of `[:n]` or `[:, :n]`."""
    many = index if isinstance(index, tuple) else (index,)
    spans = (item for item in many if isinstance(item, slice) and item.step is None)
    return {span.stop for span in spans if not span.start and isinstance(span.stop, int)}


def require_plain(
    query: Tensor, key: Tensor, *, attn_mask: Tensor | None, dropout_p: float
) -> None:
    """Refuse attention that the ring cannot compute.

    Raises:
        ModelError: a mask, dropout of attention weights, or tokens that attend to another sequence.
    """
    if attn_mask is not None:
        raise ModelError(
            f"attention with a mask of {tuple(attn_mask.shape)}: a rank has a part of the tokens,"
            " and the mask of the others is unknown to it",
            hints=[
                "causal attention (is_causal=True) and attention without a mask can be sharded",
                "set cp=1 for padded rows, sliding windows and biases",
            ],
        )
    if dropout_p > 0:
        raise ModelError(
            f"attention drops out weights (p={dropout_p:g}), which the ring's kernels do not",
            hints=["set the model's attention dropout to 0, or cp=1"],
        )
    if query.dim() not in (3, 4) or query.shape[-2] != key.shape[-2]:
        raise ModelError(
            f"attention of {tuple(query.shape)} to {tuple(key.shape)}: cp shards one sequence"
            " that attends to itself",
            hints=["set cp=1"],
        )
