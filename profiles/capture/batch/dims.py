"""Dimensions of a batch: which of its values have a row for each sample, and along which dimension.

The dimensions of a batch are a mapping by name: a number for a tensor, "elements" for a list with
an element for each sample (images of several sizes, texts), None for what every sample shares (a
table of positions, a scalar). They are inferred: the number of rows is the size that explains most
tensors, as their first dimension or as the length of the list that they are in. What another size
leaves unexplained is tried by `profiles.capture.two_sizes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any, Literal, TypeAlias

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from profiles.capture.batch.tree import (
    INSIDE,
    Batch,
    batch_items,
    batch_tensors,
    describe,
    map_nodes,
)
from profiles.errors import BatchError, UnknownNameError, a_type

Dim: TypeAlias = int | Literal["elements"] | None
Dims: TypeAlias = Mapping[str, Dim]
SaidDims: TypeAlias = Dims | Sequence[Dim] | int | None
"""As users say them: by name, or in order for a tuple, or the one of a tensor; not all of them."""
ELEMENTS: Literal["elements"] = "elements"
_MOST_TRIED = 32


def possible_dims(batch: Batch, said: SaidDims = None) -> list[dict[str, Dim]]:
    """The dimensions that a batch may have, the likeliest first; one if nothing is left open.

    Args:
        said: those that are known.

    Raises:
        BatchError: no tensor has rows, or a value cannot be cut.
        UnknownNameError: `said` has a name that the batch has not.
    """
    fixed = _by_name(batch, said)
    sizes = _sizes(batch, fixed)
    if not sizes:
        kinds = "no tensor" if not batch_tensors(batch) else "no tensor with a dimension"
        raise BatchError(f"the batch holds {kinds} ({describe(batch)})")
    explained = [_explained(batch, rows, fixed) for rows in sizes]
    # Of equals the target's: the last of a tuple. Then that of the first tensor.
    last = sizes.index(_target_size(batch, sizes))
    best = max(range(len(sizes)), key=lambda n: (explained[n][1], n == last, -n))
    dims, _, odd = explained[best]
    choices: list[list[Dim]] = [
        [None, *(d for d in range(1, t.ndim) if t.size(d) == sizes[best])] for t in odd.values()
    ]
    combined = islice(product(*choices), _MOST_TRIED)
    return [{**dims, **dict(zip(odd, choice, strict=True))} for choice in combined]


def dims_of(batch: Batch) -> dict[str, Dim]:
    """The dimensions of a batch of which nothing else is known.

    Raises:
        BatchError: tensors differ in their first dimension; names and sizes are in the text.
    """
    dims = possible_dims(batch)[0]
    odd = [n for n, v in batch_items(batch) if n in dims and _is_open(v, dims[n])]
    if odd:
        raise sizes_differ(batch)
    return dims


def _is_open(value: object, dim: Dim) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and dim is None


def sizes_differ(batch: Batch) -> BatchError:
    """The error of a batch whose tensors have no size in common."""
    sizes = {n: v.size(0) for n, v in batch_items(batch) if isinstance(v, Tensor) and v.ndim}
    return BatchError(
        "first dimensions differ: " + ", ".join(f"{n} has {size}" for n, size in sizes.items()),
        where=describe(batch),
        hints=[
            "the first dimension of every tensor is the batch, or `batch_dims=` says which one is:"
            f' {{"{next(iter(sizes), "name")}": 1}}, None for a tensor that all samples share'
        ],
    )


def describe_dims(dims: Dims) -> str:
    """The values that have rows, on one line.

    >>> describe_dims({"ids": 0, "labels": 0, "positions": None})
    'rows: ids, labels; shared by all samples: positions'
    """
    groups: dict[str, list[str]] = {}
    for name, dim in dims.items():
        words = f"rows along dimension {dim}" if dim else "rows"
        words = "a sample an element" if dim == ELEMENTS else words
        groups.setdefault("shared by all samples" if dim is None else words, []).append(name)
    return "; ".join(f"{words}: {', '.join(names)}" for words, names in groups.items())


def dim_of(name: str, value: object, dims: Dims) -> Any:
    """The dimension of a value, `INSIDE` where those of its parts count."""
    if isinstance(value, PackedSequence):
        raise BatchError(
            f"`{name}` is a PackedSequence, which cannot be cut into rows",
            hints=["give the padded tensor and the lengths, and let the model pack them"],
        )
    if isinstance(value, np.ndarray) and value.ndim:
        raise BatchError(
            f"`{name}` is a numpy array; a batch holds tensors",
            hints=["torch.from_numpy makes one of it"],
        )
    is_tensor = isinstance(value, Tensor)
    if name in dims:
        dim = dims[name]
        is_row = isinstance(value, tuple | list)
        if dim is None or (is_row if dim == ELEMENTS else is_tensor):
            return dim
    if isinstance(value, Tensor):
        return 0 if value.ndim else None
    return INSIDE


def _sizes(batch: Batch, fixed: Dims) -> list[int]:
    """Numbers of rows that the batch may have, in order; those of fixed dimensions alone if any."""
    said: list[int] = []
    open_: list[int] = []

    def visit(name: str, value: Any) -> object:
        if name in fixed:
            dim = dim_of(name, value, fixed)
            if isinstance(dim, int) and dim < value.ndim:
                said.append(value.size(dim))
            elif dim == ELEMENTS:
                said.append(len(value))
            return INSIDE if dim is INSIDE else value
        if isinstance(value, Tensor) and value.ndim:
            open_.append(value.size(0))
        elif _is_list(value) and batch_tensors(value):
            open_.append(len(value))
        return INSIDE

    map_nodes(visit, batch)
    return list(dict.fromkeys(said or open_))


def _target_size(batch: Batch, sizes: Sequence[int]) -> int:
    last = batch_tensors(batch)[-1:] if isinstance(batch, tuple | list) else []
    return next((t.size(0) for t in last if t.ndim and t.size(0) in sizes), sizes[0])


def _explained(
    batch: Batch, rows: int, fixed: Dims
) -> tuple[dict[str, Dim], int, dict[str, Tensor]]:
    """Dimensions if the batch has so many rows, the number of tensors that this explains, and the
    others."""
    dims: dict[str, Dim] = {}
    odd: dict[str, Tensor] = {}
    count = 0

    def visit(name: str, value: Any) -> object:
        nonlocal count
        if name in fixed and dim_of(name, value, fixed) is not INSIDE:
            dims[name] = fixed[name]
        elif _is_list(value) and len(value) == rows and _is_by_sample(value, rows):
            dims[name] = ELEMENTS
            count += len(batch_tensors(value))
        elif not isinstance(value, Tensor):
            dim_of(name, value, fixed)
            return INSIDE
        elif not value.ndim:
            dims[name] = None
        elif value.size(0) == rows:
            dims[name] = 0
            count += 1
        else:
            odd[name] = value
        return value

    map_nodes(visit, batch)
    return dims, count, odd


def _is_list(value: object) -> bool:
    return isinstance(value, tuple | list) and not hasattr(value, "_fields")


def _is_by_sample(values: Sequence[object], rows: int) -> bool:
    """True of a list that is no list of tensors with rows of their own; texts come in lists, not in
    tuples."""
    tensors = batch_tensors(values)
    if not tensors:
        return isinstance(values, list)
    return not all(t.ndim and t.size(0) == rows for t in tensors)


def _by_name(batch: Batch, said: SaidDims) -> dict[str, Dim]:
    """The dimensions that a user says, of every value; that of a container is of its tensors."""
    if said is None:
        return {}
    if isinstance(said, int):
        said = {"input": said}
    elif not isinstance(said, Mapping | Sequence):
        raise BatchError(
            f"batch_dims is {a_type(said)}",
            hints=['give a number for each value: (0, 1), or by name {"positions": None}'],
        )
    elif not isinstance(said, Mapping):
        said = {f"element {number}": dim for number, dim in enumerate(said)}
    fixed: dict[str, Dim] = {}
    names: list[str] = []

    def visit(name: str, value: Any) -> object:
        names.append(name)
        outer = next((n for n in (name, *_outer(name)) if n in said), None)
        if outer is not None and (outer == name or isinstance(value, Tensor)):
            dim = said[outer]
            _require_dim(name, dim, value)
            if not isinstance(dim, int) or isinstance(value, Tensor):
                fixed[name] = dim
                return value
        return INSIDE

    map_nodes(visit, batch)
    for name in said:
        if name not in names:
            raise UnknownNameError("value of the batch", name, names, where="batch_dims")
    return fixed


def _outer(name: str) -> Iterator[str]:
    """The names of the containers that a value is in, from the inside out."""
    for place in range(len(name) - 1, 0, -1):
        if name[place] in ".[":
            yield name[:place]


def _require_dim(name: str, dim: Any, value: object) -> None:
    if dim is None or (dim == ELEMENTS and isinstance(value, tuple | list)):
        return
    if type(dim) is int and isinstance(value, Tensor) and not 0 <= dim < value.ndim:
        raise BatchError(
            f"`{name}` has {value.ndim} dimensions, there is no dimension {dim}",
            where="batch_dims",
        )
    if type(dim) is not int:
        raise BatchError(
            f"`{name}` = {dim!r} is no dimension",
            where="batch_dims",
            hints=['give a number, None for what all samples share, or "elements" for a list'],
        )
