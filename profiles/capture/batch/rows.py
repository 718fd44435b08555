"""Rows of a batch: counted, cut and repeated, along the dimensions that it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from profiles.capture.batch.dims import ELEMENTS, Dim, Dims, dim_of, dims_of
from profiles.capture.batch.tree import INSIDE, Batch, describe, map_nodes
from profiles.errors import BatchError


def batch_size(batch: Batch, dims: Dims | None = None) -> int:
    """Samples in a batch.

    Args:
        dims: of a batch like it; a tensor that is not in them has its rows first.

    Raises:
        BatchError: no tensor, or sizes that differ; names and sizes are in the text.
    """
    dims = dims or dims_of(batch)
    sizes: dict[str, tuple[int, Dim]] = {}

    def visit(name: str, value: Any) -> object:
        dim = dim_of(name, value, dims)
        if dim is INSIDE:
            return INSIDE
        if dim == ELEMENTS:
            sizes[name] = len(value), dim
        elif isinstance(dim, int):
            if dim >= value.ndim:
                raise BatchError(
                    f"`{name}` has {value.ndim} dimensions, its rows are along dimension {dim}",
                    where=describe(batch),
                )
            sizes[name] = value.size(dim), dim
        return value

    map_nodes(visit, batch)
    if not sizes:
        raise BatchError(f"the batch holds no tensor with rows ({describe(batch)})")
    if len({size for size, _ in sizes.values()}) > 1:
        along = {0: "", ELEMENTS: " elements"}
        words = [
            f"{name} has {size}{along.get(dim or 0, f' along dimension {dim}')}"
            for name, (size, dim) in sizes.items()
        ]
        is_first = all(dim == 0 for _, dim in sizes.values())
        raise BatchError(
            f"{'first dimensions' if is_first else 'numbers of rows'} differ: {', '.join(words)}",
            where=describe(batch),
            hints=[
                "every sample has a row in each of them; `batch_dims=` names a tensor that all"
                " samples share: {name: None}"
            ],
        )
    return next(iter(sizes.values()))[0]


def split_rows(
    batch: Batch, sizes: Sequence[int], dims: Dims | None = None, *, rows: int | None = None
) -> list[Batch]:
    """The batch cut into parts of `sizes` rows, as views; what has no rows goes along whole.

    Args:
        rows: `batch_size` of it, where it is known.

    Raises:
        BatchError: `sizes` do not add up to the batch size.
    """
    dims = dims or dims_of(batch)
    rows = batch_size(batch, dims) if rows is None else rows
    if sum(sizes) != rows:
        raise BatchError(f"{rows} rows cannot be cut into {' + '.join(map(str, sizes))}")
    if len(sizes) == 1:
        return [batch]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [_part(batch, dims, s, size) for s, size in zip(starts, sizes, strict=True)]


def _part(batch: Batch, dims: Dims, start: int, size: int) -> Batch:
    def visit(name: str, value: Any) -> object:
        dim = dim_of(name, value, dims)
        if dim == ELEMENTS:
            return value[start : start + size]
        if not isinstance(dim, int):
            return INSIDE if dim is INSIDE else value
        return (
            _nested_rows(value, start, size) if value.is_nested else value.narrow(dim, start, size)
        )

    return map_nodes(visit, batch)


def _nested_rows(tensor: Tensor, start: int, size: int) -> Tensor:
    if tensor.layout is not torch.jagged:
        return torch.nested.as_nested_tensor(list(tensor.unbind())[start : start + size])
    jagged = cast(Any, tensor)
    offsets = jagged.offsets()[start : start + size + 1]
    values = jagged.values()[int(offsets[0]) : int(offsets[-1])]
    made: Tensor = torch.nested.nested_tensor_from_jagged(values, offsets - offsets[0])
    return made


def repeat_rows(batch: Batch, times: int, dims: Dims) -> Batch:
    """All rows, `times` times over; tensors are leaves of a graph that need gradients as before."""

    def visit(name: str, value: Any) -> object:
        dim = dim_of(name, value, dims)
        if dim is INSIDE:
            return INSIDE
        if dim == ELEMENTS:
            return value * times
        if not isinstance(value, Tensor):
            return value
        if isinstance(dim, int) and value.is_nested:
            return torch.nested.as_nested_tensor(list(value.unbind()) * times, layout=value.layout)
        again = [value.detach()] * times if isinstance(dim, int) else [value.detach()]
        made = torch.cat(again, dim or 0) if len(again) > 1 else again[0]
        return made.requires_grad_(value.requires_grad)

    return map_nodes(visit, batch)
