"""Tensors of an output that lie in objects: a distribution, a class of the user's own.

FSDP2 and DDP look for them in tuples, lists, dicts and registered data classes alone, and hang to
what they find that a backward needs them: FSDP2 the gather and the reduction of a unit, DDP the
search for unused parameters. Others would be computed with, and their gradients never exchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import Enum
from types import (
    BuiltinFunctionType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import NamedTuple

import torch
from torch import Tensor, nn

from profiles.torch_compat import flatten, tensors_in

MOST_OBJECTS = 10_000
"""To look into: an output may lead to all of a program."""
_PLAIN = (
    *(str, bytes, bool, int, float, complex, type(None), type, Enum, torch.dtype, torch.device),
    *(FunctionType, BuiltinFunctionType, MethodType, ModuleType, torch.Generator, nn.Module),
)


class Opened(NamedTuple):
    """An output, and tensors that lie in its objects."""

    hidden: tuple[Tensor, ...]
    output: object


def every_tensor_in(output: object) -> list[Tensor]:
    """The tensors in an output, and those in its objects that gradients flow to."""
    return [*tensors_in(output), *hidden_tensors(output)]


def hidden_tensors(output: object) -> tuple[Tensor, ...]:
    """Tensors that gradients flow to in the objects of an output; of a view what it is a view of,
    which gets the same gradients and no operation in place takes hooks from."""
    reached: dict[int, Tensor] = {}
    pending = [leaf for leaf in flatten(output)[0] if not isinstance(leaf, (Tensor, *_PLAIN))]
    seen: dict[int, object] = {}  # by id; kept, so that no other object gets it
    while pending and len(seen) < MOST_OBJECTS:
        value = pending.pop()
        if id(value) in seen or isinstance(value, _PLAIN):
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            base = value._base
            seen_by_backward = value if base is None or base.grad_fn is None else base
            if seen_by_backward.grad_fn is not None:
                reached[id(seen_by_backward)] = seen_by_backward
        elif isinstance(value, (set, frozenset)):
            pending.extend(value)
        else:
            leaves = flatten(value)[0]
            is_leaf = len(leaves) == 1 and leaves[0] is value
            pending.extend(_attributes(value) if is_leaf else leaves)
    return tuple(reached.values())


def opened(output: object) -> object:
    """The output, with what lies in its objects beside it if there is any."""
    if not torch.is_grad_enabled():
        return output
    hidden = hidden_tensors(output)
    return Opened(hidden, output) if hidden else output


def closed(output: object) -> object:
    """The reverse of `opened`."""
    return output.output if isinstance(output, Opened) else output


def open_output(module: nn.Module, args: object, output: object) -> object:
    """A forward hook, before those that look for tensors."""
    return opened(output)


def close_output(module: nn.Module, args: object, output: object) -> object:
    """A forward hook, after those that look for tensors."""
    return closed(output)


def _attributes(value: object) -> Iterator[object]:
    """The values that an object holds, without running code of its class."""
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        for name in _slots(kind):
            slot = vars(kind).get(name)
            if isinstance(slot, MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # empty
                    yield slot.__get__(value)


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
