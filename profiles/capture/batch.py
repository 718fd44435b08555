"""Structure of a batch, and the call of a model and a loss on it. All engines use this definition.

A batch is a tensor, a tuple (inputs..., target) or a mapping of keyword arguments. The first
dimension of every tensor is the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from torch import Tensor

from profiles.errors import BatchError, ModelError

Batch: TypeAlias = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
LossFn: TypeAlias = Callable[..., Tensor]


def call_model(model: Callable[..., object], batch: Batch, *, has_target: bool) -> object:
    """The model's output: `model(x)`, `model(*inputs)` or `model(**batch)`.

    `has_target` says that the last element of a tuple is for the loss alone.

    Raises:
        BatchError: there should be a target, and the batch has no place for one.
    """
    if isinstance(batch, Mapping):
        return model(**batch)
    if not has_target:
        return model(batch) if isinstance(batch, Tensor) else model(*batch)
    if isinstance(batch, Tensor) or len(batch) < 2:
        raise BatchError(
            f"loss_fn needs a target, the batch has none ({describe(batch)})",
            hints=["give (inputs..., target), or leave loss_fn out"],
        )
    return model(*batch[:-1])


def loss_of(output: object, batch: Batch, loss_fn: LossFn | None) -> Tensor:
    """The scalar loss: `loss_fn(output, target)`, or what the model computed itself.

    With a mapping the call is `loss_fn(output, batch)`.

    Raises:
        ModelError: no loss_fn and no loss in the output, or the loss is not one number.
    """
    if loss_fn is None:
        loss = find_loss(output)
    else:
        loss = loss_fn(output, batch if isinstance(batch, Mapping) else batch[-1])
    if loss is None:
        raise ModelError(
            f"the model returns no loss (its output is a {type(output).__name__})",
            hints=["give loss_fn, as in loss_fn(output, target)"],
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ModelError(
            f"the loss is {shown}, it must be one number",
            hints=["let it be the mean over the batch"],
        )
    return loss


def find_loss(output: object) -> Tensor | None:
    """The loss in a model's output: a scalar, `output.loss` or `output["loss"]`; else None."""
    if isinstance(output, Tensor):
        return output if output.ndim == 0 else None
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else None


def batch_size(batch: Batch) -> int:
    """Samples in a batch.

    Raises:
        BatchError: no tensor, or first dimensions that differ; names and shapes are in the text.
    """
    rows = {}
    for name, value in batch_items(batch):
        if isinstance(value, Tensor):
            if value.ndim == 0:
                raise BatchError(
                    f"`{name}` has no dimensions; the first one of every tensor is the batch",
                    where=describe(batch),
                )
            rows[name] = value.shape[0]
        elif isinstance(value, Sequence | Mapping) and not isinstance(value, str):
            raise BatchError(
                f"`{name}` is a {type(value).__name__}; a batch holds tensors",
                where=describe(batch),
                hints=["pass each tensor as an argument of its own"],
            )
    if not rows:
        raise BatchError(f"the batch holds no tensor ({describe(batch)})")
    if len(set(rows.values())) > 1:
        raise BatchError(
            "first dimensions differ: " + ", ".join(f"{n} has {size}" for n, size in rows.items()),
            where=describe(batch),
            hints=["the first dimension of every tensor is the batch"],
        )
    return next(iter(rows.values()))


def split_rows(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """The batch cut along its first dimension, as views; values that are not tensors go along.

    Raises:
        BatchError: `sizes` do not add up to the batch size.
    """
    rows = batch_size(batch)
    if sum(sizes) != rows:
        raise BatchError(f"{rows} rows cannot be cut into {' + '.join(map(str, sizes))}")
    parts, start = [], 0
    for size in sizes:
        parts.append(map_batch(functools.partial(_rows, start=start, size=size), batch))
        start += size
    return parts


def _rows(tensor: Tensor, *, start: int, size: int) -> Tensor:
    return tensor.narrow(0, start, size)


def map_batch(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """`function` of every tensor, in the same arrangement (a mapping becomes a dict)."""

    def mapped(value: Tensor) -> Tensor:
        return function(value) if isinstance(value, Tensor) else value

    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {name: mapped(value) for name, value in batch.items()}
    return tuple(mapped(value) for value in batch)


def batch_tensors(batch: Batch) -> list[Tensor]:
    """The tensors of a batch, in order."""
    return [value for _, value in batch_items(batch) if isinstance(value, Tensor)]


def describe(batch: Batch) -> str:
    """Names, dtypes and shapes on one line.

    >>> import torch
    >>> describe({"ids": torch.zeros(2, 8, dtype=torch.long)})
    'ids: int64 (2, 8)'
    """
    words = []
    for name, value in batch_items(batch):
        kind = type(value).__name__
        if isinstance(value, Tensor):
            kind = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        words.append(f"{name}: {kind}")
    return ", ".join(words) or "empty"


def batch_items(batch: Batch) -> list[tuple[str, object]]:
    """Names and values of a batch, in order; elements of a tuple are named by their number."""
    if isinstance(batch, Tensor):
        return [("input", batch)]
    if isinstance(batch, Mapping):
        return [(str(name), value) for name, value in batch.items()]
    if isinstance(batch, tuple | list):
        return [(f"element {index}", value) for index, value in enumerate(batch)]
    raise BatchError(
        f"a {type(batch).__name__} is not a batch",
        hints=["give a tensor, a tuple (inputs..., target) or a dict of keyword arguments"],
    )
