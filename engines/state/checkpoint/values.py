"""Values of a state dict as JSON: numbers, text and containers of them; tensors are taken out.

Types that JSON lacks are objects with one key that begins with `$`. Nothing is pickled, so reading
runs no code.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from profiles.errors import FileError, InputError, a_type

State = dict[str, Any]

MOST_DEPTH = 64
"""Containers inside one another, so that reading stays far from Python's recursion limit."""


def encode(value: object, name: str, tensors: dict[str, Tensor], *, depth: int = 0) -> Any:
    """`value` as JSON; its tensors and arrays go into `tensors`, named after their place in it.

    Args:
        depth: containers that `value` is inside of.

    Raises:
        InputError: a value of another type, with its place; or nested too deep.
    """
    if depth > MOST_DEPTH:
        raise InputError(f"`{name[:80]}...` is nested more than {MOST_DEPTH} deep")

    def inner(item: object, key: object) -> Any:
        return encode(item, f"{name}.{key}", tensors, depth=depth + 1)

    def pairs(mapping: Mapping[Any, object]) -> list[Any]:
        return [[inner(k, f"key{n}"), inner(v, k)] for n, (k, v) in enumerate(mapping.items())]

    def items(sequence: Any) -> list[Any]:
        return [inner(item, number) for number, item in enumerate(sequence)]

    match value:
        case None | bool() | str():
            return value
        case np.bool_() | np.number():
            return encode(value.item(), name, tensors, depth=depth)
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else {"$float": str(float(value))}
        case DTensor():
            raise InputError(
                f"`{name}` is a shard of a tensor of {tuple(value.shape)}, under no parameter's"
                " name: a rank alone cannot save it",
                hints=["save it in a dict under the parameter's name, or whole: `full_tensor()`"],
            )
        case Tensor():
            tensors[name] = value.detach()
            return {"$tensor": name}
        case np.ndarray() if value.dtype.kind in "biuf":
            tensors[name] = torch.from_numpy(np.ascontiguousarray(value))
            return {"$array": name}
        case torch.dtype():
            return {"$dtype": str(value).removeprefix("torch.")}
        case torch.device():
            return {"$device": str(value)}
        case bytes():
            return {"$bytes": base64.b64encode(value).decode()}
        case list():
            return items(value)
        case tuple():
            return {"$tuple": items(value)}
        case deque():
            return {"$deque": items(value)}
        case set() | frozenset():
            return {"$set": items(sorted(value, key=repr))}
        case Counter():
            return {"$counter": pairs(value)}
        case dict():
            plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
            return {k: inner(v, k) for k, v in value.items()} if plain else {"$dict": pairs(value)}
    raise InputError(
        f"`{name}` is {a_type(value)}: checkpoints hold tensors, arrays, numbers, text"
        " and lists or dicts of them",
        hints=["leave it out of `state_dict()`, or store what it is made from"],
    )


def decode(value: Any, tensor_of: Callable[[str], Tensor]) -> Any:
    """The inverse of `encode`; `tensor_of` reads a tensor by its name.

    Raises:
        FileError: not what `encode` writes.
    """

    def inner(item: Any) -> Any:
        return decode(item, tensor_of)

    def mapping(pairs: Any) -> dict[Any, Any]:
        return {inner(key): inner(item) for key, item in pairs}

    if isinstance(value, list):
        return [inner(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if len(value) != 1 or not tag.startswith("$"):
        return {key: inner(item) for key, item in value.items()}
    content = value[tag]
    readers: dict[str, Callable[[], Any]] = {
        "$float": lambda: float(content),
        "$tensor": lambda: tensor_of(content),
        "$array": lambda: tensor_of(content).numpy(),
        "$dtype": lambda: dtype_of(content),
        "$device": lambda: torch.device(content),
        "$bytes": lambda: base64.b64decode(content, validate=True),
        "$tuple": lambda: tuple(inner(content)),
        "$deque": lambda: deque(inner(content)),
        "$set": lambda: set(inner(content)),
        "$counter": lambda: Counter(mapping(content)),
        "$dict": lambda: mapping(content),
    }
    if tag not in readers:
        raise FileError(f"unknown type `{tag}` in a checkpoint")
    try:
        return readers[tag]()
    except (TypeError, ValueError, KeyError, RuntimeError, AttributeError) as error:
        raise FileError(f"broken `{tag}` in a checkpoint: {error}") from None


def dtype_of(name: str) -> torch.dtype:
    """`torch.float32` of "float32".

    Raises:
        FileError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise FileError(f"unknown dtype `{name}` in a checkpoint")
    return dtype
