"""Functions of torch that leave the last dimension alone: what may lie between logits and loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from profiles.torch_compat import without_modes


def _reading(*attributes: str) -> set[Callable[..., Any]]:
    """The function that `__torch_function__` gets where an attribute is read."""
    return {getattr(Tensor, name).__get__ for name in attributes}


ABOUT_SHAPE = {
    *_reading("shape", "dtype", "device", "ndim", "layout", "_base"),
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.__len__,
    Tensor.is_floating_point,
    torch.is_floating_point,
}
NEEDS_GRADIENT = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
ABOUT_GRADIENT = {NEEDS_GRADIENT, *_reading("grad_fn"), Tensor.register_hook}
DETACHES = {Tensor.detach, torch.detach, *_reading("data")}
CASTS = {Tensor.float, Tensor.to, Tensor.double, Tensor.bfloat16, Tensor.half, Tensor.contiguous}
RESHAPES = {Tensor.view, Tensor.reshape, torch.reshape}
FLATTENS = {Tensor.flatten, torch.flatten}
SCALES = {
    Tensor.mul, Tensor.div, Tensor.__mul__, Tensor.__truediv__, Tensor.__rmul__, Tensor.tanh,
    torch.mul, torch.div, torch.tanh,
}  # fmt: skip
MOVES = {*RESHAPES, *FLATTENS, Tensor.__getitem__}
"""Those that say which rows there are, and leave values as they are."""


def keeps_last(
    func: Callable[..., Any],
    shape: Sequence[int],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> bool:
    """True if `func` does to a tensor of `shape` what it does to each part of its last dimension.

    Args:
        args, kwargs: those after the tensor itself.
    """
    if keeps_values(func, args, kwargs):
        return True
    if func in RESHAPES:
        sizes = () if kwargs else sizes_of(args)
        return len(sizes) > 1 and sizes[-1] == shape[-1]
    if func in FLATTENS:
        dims = len(shape)
        start, end = (args[0] if args else 0), (args[1] if len(args) > 1 else -1)
        return not kwargs and 0 <= start % dims <= end % dims < dims - 1
    return func is Tensor.__getitem__ and _leaves_last(args[0], len(shape))


def moves_last_to_second(
    func: Callable[..., Any], dims: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """True if `func` turns (rows, ..., classes) into (rows, classes, ...), as `F.cross_entropy`
    takes more than one place a row.

    Args:
        dims: of the tensor.
        args, kwargs: those after the tensor itself.
    """
    if func not in _TURNS or dims < 3:
        return False
    rows, *places, classes = range(2, 2 + dims)  # unlike sizes say which went where
    with without_modes():
        turned = func(torch.empty(rows, *places, classes, device="meta"), *args, **kwargs)
    return tuple(turned.shape) == (rows, classes, *places)


_TURNS = {
    Tensor.transpose, Tensor.swapaxes, Tensor.swapdims, Tensor.movedim, Tensor.moveaxis,
    torch.transpose, torch.swapaxes, torch.swapdims, torch.movedim, torch.moveaxis,
    Tensor.permute, torch.permute, *_reading("mT"),
}  # fmt: skip


def keeps_values(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if `func` casts or scales: the same of every element, whatever the shape."""
    is_scale = func in SCALES and not kwargs and all(isinstance(v, int | float) for v in args)
    return func in CASTS or is_scale


def sizes_of(args: Sequence[Any]) -> Sequence[int]:
    """The sizes that a reshape is asked for; empty where they are no numbers."""
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
