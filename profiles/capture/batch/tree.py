"""Values in a batch by name, in any nesting, and copies of it with others in their place.

Gone into are tuples, named tuples, lists, mappings (BatchEncoding and ModelOutput of transformers
too), dataclasses, and objects with a tensor among their attributes. All else is a leaf.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from profiles.errors import BatchError, a_type

Batch: TypeAlias = Any
"""A tensor, a tuple (inputs..., target), a mapping of keyword arguments, or one object that is the
model's only argument; with anything inside."""
INSIDE = object()
"""Answer of a visitor: go into this value; a leaf stays as it is."""
Visit = Callable[[str, Any], Any]
_LEAVES = (Tensor, str, bytes, nn.Module, PackedSequence, type)


class _Parts(NamedTuple):
    """Values inside a value, each with the end of its name; `rebuilt` takes others in order."""

    values: Sequence[tuple[str, object]]
    rebuilt: Callable[[list[Any]], object]


def map_nodes(visit: Visit, batch: Batch) -> Batch:
    """`batch` with each value inside replaced by `visit(name, value)`, from the outside in.

    Names begin with an argument of the model: `input` of a tensor alone, `element 1` of a tuple, a
    key of a mapping; and go on as in Python, `targets[0].boxes`. Containers keep their types, but
    for subclasses of tuple and list, and mappings that cannot be changed.
    """
    parts = _parts(batch)
    if parts is None:
        made = visit("input", batch)
        return batch if made is INSIDE else made
    return parts.rebuilt([_mapped(visit, _top(end), value) for end, value in parts.values])


def _top(end: str) -> str:
    return f"element {end[1:-1]}" if end.startswith("[") else end[1:]


def _mapped(visit: Visit, name: str, value: object) -> object:
    made = visit(name, value)
    if made is not INSIDE:
        return made
    parts = _parts(value)
    if parts is None:
        return value
    return parts.rebuilt([_mapped(visit, f"{name}{end}", part) for end, part in parts.values])


def _parts(value: object) -> _Parts | None:
    """None of a leaf."""
    if isinstance(value, _LEAVES):
        return None
    if isinstance(value, Mapping):
        keys = list(value)
        return _Parts([(f".{k}", value[k]) for k in keys], lambda new: _mapping(value, keys, new))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named = [(f".{name}", getattr(value, name)) for name in value._fields]
        return _Parts(named, lambda new: type(value)(*new))
    if isinstance(value, tuple | list):
        kind: type[Any] = tuple if isinstance(value, tuple) else list
        return _Parts([(f"[{n}]", part) for n, part in enumerate(value)], kind)
    if is_dataclass(value):
        return _of_attributes(value, [field.name for field in fields(value)])
    attributes = getattr(value, "__dict__", {})
    if any(isinstance(part, Tensor) for part in attributes.values()):
        return _of_attributes(value, list(attributes))
    return None


def _mapping(value: Mapping[Any, Any], keys: Sequence[Any], new: Sequence[Any]) -> object:
    if not isinstance(value, MutableMapping):
        return dict(zip(keys, new, strict=True))
    made = copy.copy(value)
    for key, part in zip(keys, new, strict=True):
        made[key] = part
    return made


def _of_attributes(value: object, names: Sequence[str]) -> _Parts:
    def rebuilt(new: Sequence[object]) -> object:
        made = copy.copy(value)
        for name, part in zip(names, new, strict=True):
            object.__setattr__(made, name, part)
        return made

    return _Parts([(f".{name}", getattr(value, name)) for name in names], rebuilt)


def is_leaf(value: object) -> bool:
    """True of a tensor, and of what nothing is gone into for."""
    return _parts(value) is None


def map_batch(function: Callable[[Tensor], object], batch: Batch) -> Batch:
    """`batch` with each tensor replaced by `function` of it."""
    return map_nodes(lambda _, v: function(v) if isinstance(v, Tensor) else INSIDE, batch)


def batch_items(batch: Batch) -> list[tuple[str, object]]:
    """Names and values of the leaves, in order.

    Raises:
        BatchError: nothing that a model could be given.
    """
    if batch is None or isinstance(batch, str | bytes | int | float):
        raise BatchError(
            f"{a_type(batch)} is not a batch",
            hints=["give a tensor, a tuple (inputs..., target) or a dict of keyword arguments"],
        )
    parts = _parts(batch)
    if parts is None:
        return [("input", batch)]
    return [item for end, value in parts.values for item in _items(_top(end), value)]


def _items(name: str, value: object) -> list[tuple[str, object]]:
    parts = _parts(value)
    if parts is None:
        return [(name, value)]
    return [item for end, part in parts.values for item in _items(f"{name}{end}", part)]


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
            kind = f"{str(value.dtype).removeprefix('torch.')} {_shape(value)}"
        words.append(f"{name}: {kind}")
    return ", ".join(words) or "empty"


def _shape(tensor: Tensor) -> str:
    if tensor.is_nested:
        return f"nested, {tensor.size(0)} rows"
    return str(tuple(tensor.shape))
