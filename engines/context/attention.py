"""What a forward sees on a rank that has a part of the tokens: attention to all, true places."""

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

    With `places`, code that counts tokens by itself gets the true places of the rank's: whole
    numbers from 0 to as many tokens as the rank has (`torch.arange(T)`), and the first rows of a
    parameter or buffer by place (`table[:T]`, `table[:, :T]`).

    Args:
        places: of the rank's tokens, int64 (T); None leaves counting as it is.
        model: whose parameters and buffers may be such tables.
    """

    def __init__(self, attend: Attend, *, places: Tensor | None, model: nn.Module) -> None:
        super().__init__()
        self._attend = attend
        self._places = places
        self._buffers = {id(buffer) for buffer in model.buffers()} if places is not None else set()

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
            if func is torch.arange and self._counts(args, kwargs):
                dtype, device = kwargs.get("dtype"), kwargs.get("device")
                return self._places.to(device=device or self._places.device, dtype=dtype)
            if func is Tensor.__getitem__ and self._is_table(args[0]):
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

    def _counts(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether it is as many whole numbers from 0 as the rank has tokens."""
        assert self._places is not None
        numbers = [*args, *(kwargs[name] for name in ("start", "end", "step") if name in kwargs)]
        return numbers in ([len(self._places)], [0, len(self._places)], [0, len(self._places), 1])

    def _is_table(self, tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) or id(tensor) in self._buffers

    def _rows(self, table: Tensor, index: Any) -> Tensor:
        assert self._places is not None
        many = index if isinstance(index, tuple) else (index,)
        first = slice(len(self._places))
        from_zero = slice(0, len(self._places))
        if any(isinstance(item, slice) and item in (first, from_zero) for item in many):
            places = self._places.to(table.device)
            many = tuple(
                places if isinstance(item, slice) and item in (first, from_zero) else item
                for item in many
            )
            return table[many]
        return table[index]


def require_plain(
    query: Tensor, key: Tensor, *, attn_mask: Tensor | None, dropout_p: float
) -> None:
    """Refuse what cannot be computed ring by ring.

    Raises:
        ModelError: a mask, attention that drops out weights, or tokens that look at others than
            those of their own sequence.
    """
    if attn_mask is not None:
        raise ModelError(
            f"attention with a mask of {tuple(attn_mask.shape)}: a rank has a part of the tokens,"
            " and cannot know what the mask would be for the others",
            hints=[
                "causal attention (is_causal=True) and attention without a mask can be shared",
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
            f"attention of {tuple(query.shape)} to {tuple(key.shape)}: cp shares out one sequence"
            " that attends to itself",
            hints=["set cp=1"],
        )
