"""Logits that stay split over the vocabulary until the loss.

Whole logits in fp32 are often the largest tensors of a language model. The loss needs of them one
maximum, one sum and one entry a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from engines.state.slices import Slice, share
from engines.tensor.collectives import Collectives, GroupCollectives
from profiles.torch_compat import map_tensors, tensors_in, wrapper_tensor

_LAST = Slice(-1)


class VocabLogits(Tensor):
    """Logits (..., vocabulary) that look whole, of which this rank has a part.

    Casts, shapes that keep the last dimension, and scaling happen to the part; `F.cross_entropy`
    over the last dimension is computed from the parts. Everything else gets whole
    logits, gathered for it: always right, and as a gathered head would do.
    """

    part: Tensor
    collectives: Collectives

    @staticmethod
    def of(part: Tensor, collectives: Collectives, *, length: int) -> VocabLogits:
        """Args:
        part: (..., share of this rank).
        length: of the vocabulary.
        """
        logits = wrapper_tensor(VocabLogits, (*part.shape[:-1], length), part)
        logits.part, logits.collectives = part, collectives
        return logits

    def whole(self) -> Tensor:
        """The whole logits, gathered; all ranks call it."""
        return self.collectives.gather(self.part, _LAST, length=self.shape[-1])

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"VocabLogits({tuple(self.shape)}, {self.part.shape[-1]} of the vocabulary here)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: object, args: object = (), kwargs: object = None
    ) -> Any:
        raise NotImplementedError(f"{func} on logits that are split over the vocabulary")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _ABOUT_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        split = args[0] if args else None
        if isinstance(split, VocabLogits):
            if func in _ABOUT_PART:
                return func(split.part, *args[1:], **kwargs)
            if _keeps_split(func, split, args[1:], kwargs):
                return split._on_part(func, args[1:], kwargs)
            if func is F.cross_entropy and _is_plain_loss(split, args[1:], kwargs):
                return _loss(split, *args[1:], **kwargs)
        return func(*map_tensors(_whole, tuple(args)), **map_tensors(_whole, kwargs))

    def _on_part(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> VocabLogits:
        if func in _RESHAPES:  # asked for in whole numbers, the last of them the vocabulary
            shape = [*_sizes(args)[:-1], self.part.shape[-1]]
            result = self.part.reshape(shape)
        else:
            result = func(self.part, *args, **kwargs)
        return VocabLogits.of(result, self.collectives, length=self.shape[-1])


def _whole(tensor: Tensor) -> Tensor:
    return tensor.whole() if isinstance(tensor, VocabLogits) else tensor


def whole_tensors(output: Any) -> Any:
    """`output` with split logits gathered; all ranks call it."""
    tensors = tensors_in(output)
    return (
        map_tensors(_whole, output) if any(isinstance(t, VocabLogits) for t in tensors) else output
    )


def _reading(*attributes: str) -> set[Callable[..., Any]]:
    """The function that `__torch_function__` gets where an attribute is read."""
    return {getattr(Tensor, name).__get__ for name in attributes}


_ABOUT_SHAPE = {
    *_reading("shape", "dtype", "device", "ndim", "layout", "_base"),
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.__len__,
    Tensor.is_floating_point,
    torch.is_floating_point,
}
_ABOUT_PART = {*_reading("requires_grad", "grad_fn"), Tensor.register_hook}
_CASTS = {Tensor.float, Tensor.to, Tensor.double, Tensor.bfloat16, Tensor.half, Tensor.contiguous}
_RESHAPES = {Tensor.view, Tensor.reshape, torch.reshape}
_SCALES = {
    Tensor.mul, Tensor.div, Tensor.__mul__, Tensor.__truediv__, Tensor.__rmul__, Tensor.tanh,
    torch.mul, torch.div, torch.tanh,
}  # fmt: skip


def _keeps_split(
    func: Callable[..., Any], split: VocabLogits, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """True if `func` does to the whole what it does to each part."""
    if func in _CASTS:
        return True
    if func in _SCALES:
        return not kwargs and all(isinstance(value, int | float) for value in args)
    if func in _RESHAPES:
        sizes = () if kwargs else _sizes(args)
        return len(sizes) > 1 and sizes[-1] == split.shape[-1]
    if func in (Tensor.flatten, torch.flatten):
        dims = split.dim()
        start, end = (args[0] if args else 0), (args[1] if len(args) > 1 else -1)
        return not kwargs and 0 <= start % dims <= end % dims < dims - 1
    if func is Tensor.__getitem__:
        return _leaves_last(args[0], split.dim())
    return False


def _sizes(args: Sequence[Any]) -> Sequence[int]:
    first = args[0] if args else ()
    if isinstance(first, tuple | list):
        return first
    return args if all(type(value) is int for value in args) else ()


def _leaves_last(index: Any, dims: int) -> bool:
    """True if an index of slices and numbers takes all of the last dimension."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is ... or type(part) in (slice, int) for part in parts):
        return False
    if ... in parts:
        after = parts[parts.index(...) + 1 :]
        return not after or after[-1] == slice(None)
    return len(parts) < dims or parts[-1] == slice(None)


def _is_plain_loss(split: VocabLogits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """(tokens, vocabulary) against class numbers, without weights and smoothing."""
    settings = {**dict(zip(_LOSS_ARGUMENTS, args, strict=False)), **kwargs}
    target = settings.get("target")
    return (
        isinstance(target, Tensor)
        and not target.is_floating_point()
        and split.dim() == 2
        and settings.get("weight") is None
        and not settings.get("label_smoothing")
        and settings.get("reduce") is None
        and settings.get("size_average") is None
    )


_LOSS_ARGUMENTS = (
    "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing",
)  # fmt: skip


def _loss(
    logits: VocabLogits,
    target: Tensor,
    weight: None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy` from parts: (tokens, share) and (tokens,) in, as `reduction` says out."""
    is_counted = target != ignore_index
    losses = _token_losses(logits, torch.where(is_counted, target, 0))
    losses = torch.where(is_counted, losses, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / is_counted.sum()


def _token_losses(logits: VocabLogits, target: Tensor) -> Tensor:
    """log(sum(exp(logits))) - logits[target], (tokens,)."""
    collectives, part = logits.collectives, logits.part
    start, _ = share(logits.shape[-1], collectives.rank, collectives.size)
    here = target - start
    is_mine = (here >= 0) & (here < part.shape[-1])
    # The same number for all: it cancels out, and so needs no gradient.
    highest = part.detach().amax(-1) if part.shape[-1] else part.new_full(target.shape, -math.inf)
    if isinstance(collectives, GroupCollectives):
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=collectives.group)
    shifted = part - highest[:, None]
    total = collectives.reduce(shifted.exp().sum(-1))
    picked = torch.where(is_mine, _pick(shifted, torch.where(is_mine, here, 0)), 0.0)
    return total.log() - collectives.reduce(picked)


def _pick(rows: Tensor, columns: Tensor) -> Tensor:
    if not rows.shape[-1]:
        return rows.sum(-1)
    return rows.gather(-1, columns[:, None]).squeeze(-1)
