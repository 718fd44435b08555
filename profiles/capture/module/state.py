"""State of a module that decides what its forward does, apart from the arguments."""

from __future__ import annotations

import enum
import functools
import itertools
import logging
import random
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from profiles.capture.module.hooks import own_hooks
from profiles.torch_compat import Operator, OperatorPacket

PLAIN = int | float | complex | str | bytes | bool | range | slice | None
# Attributes that every module has: modules, tensors and hooks, looked at apart.
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
# Objects that do what they do, whatever happened before.
_CONSTANT = (
    type,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.ModuleType,
    types.WrapperDescriptorType,
    enum.Enum,
    logging.Logger,
    np.dtype,
    np.generic,
    torch.device,
    torch.dtype,
    torch.layout,
    torch.memory_format,
    Operator,
    OperatorPacket,
)
# A block and its settings have some hundred parts; one that reaches ten thousand is tied to things
# that it does not own, and following them for every block takes longer than running it.
MOST_PARTS = 10_000


@dataclass(frozen=True, slots=True)
class State:
    """As it was at one moment.

    Attributes:
        kind: equal for modules that do the same with the same arguments: classes, settings, shapes.
        tensors: parameters, buffers, and those in plain attributes.
    """

    kind: tuple[Hashable, ...]
    tensors: tuple[weakref.ref[Tensor], ...]

    def is_still(self, module: nn.Module, forward: Callable[..., object]) -> bool:
        """True if the module is unchanged, down to the identity of its tensors."""
        now = state_of(module, forward)
        if now is None or now.kind != self.kind:
            return False
        pairs = zip(self.tensors, now.tensors, strict=True)
        return all(before() is not None and before() is after() for before, after in pairs)


def state_of(module: nn.Module, forward: Callable[..., object]) -> State | None:
    """Everything that is reached from `module`, whose forward is `forward`.

    None where something is reached whose state cannot be read (generators, locks, extension types),
    where hooks watch parts of it, or where it has no end.
    """
    walk = _Walk(module)
    try:
        walk.visit(forward)
        walk.visit(module)
    except _NotReadable:
        return None
    return State(tuple(walk.kind), tuple(walk.tensors))


class Position:
    """In place of the number of a block in its list: whoever acts on it is told that it cannot be.

    Blocks that only carry their number, or hand it to a cache that is not there, are equal.
    """

    def _refuse(self, *_: object) -> bool:
        raise ActsOnPosition

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __pow__ = __rpow__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse
    __neg__ = __abs__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __lshift__ = _refuse
    __hash__ = __index__ = __int__ = __float__ = __str__ = __format__ = _refuse  # type: ignore[assignment]


class ActsOnPosition(Exception):
    """A block does something with its number."""


class _NotReadable(Exception):
    pass


class _Walk:
    """Depth first, everything once."""

    def __init__(self, root: nn.Module) -> None:
        self.kind: list[Hashable] = []
        self.tensors: list[weakref.ref[Tensor]] = []
        self._root = root
        self._seen: dict[int, int] = {}
        self._kept: list[object] = []  # so that ids stay theirs

    def visit(self, value: object) -> None:
        if isinstance(value, PLAIN):
            self.kind.append((type(value), repr(value)))
        elif isinstance(value, Position):
            self.kind.append("position")
        elif isinstance(value, _CONSTANT):
            self.kind.append(id(value))
        elif id(value) in self._seen:
            self.kind.append(("again", self._seen[id(value)]))
        else:
            self._first(value)

    def _first(self, value: object) -> None:
        if len(self._seen) >= MOST_PARTS:
            raise _NotReadable
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        match value:
            case Tensor():
                self._tensor(value)
            case nn.Module():
                self._module(value)
            case types.FunctionType():
                self._function(value)
            case types.MethodType():
                self._all("method", [value.__func__, value.__self__])
            case functools.partial():
                self._all("partial", [value.func, value.args, value.keywords])
            case np.ndarray():
                self.kind.append((value.shape, value.dtype.str, hash(value.tobytes())))
            case Mapping():
                self._all(type(value), itertools.chain.from_iterable(value.items()))
                self._attributes(value)
            case list() | tuple() | deque():
                self._all(type(value), value)
                self._attributes(value)
            case set() | frozenset():
                self._all(type(value), sorted(value, key=repr))
            case types.CellType():
                self._cell(value)
            case random.Random():
                raise _NotReadable
            case _:
                self._object(value)

    def _all(self, what: Hashable, values: Iterable[object]) -> None:
        values = list(values)
        self.kind.append((what, len(values)))
        for value in values:
            self.visit(value)

    def _tensor(self, value: Tensor) -> None:
        stride = value.stride() if value.layout is torch.strided else None
        self.kind.append(
            (
                type(value),
                tuple(value.shape),
                stride,
                value.dtype,
                value.layout,
                value.requires_grad,
            )
        )
        self.tensors.append(weakref.ref(value))

    def _module(self, value: nn.Module) -> None:
        attributes = vars(value)
        if value is self._root:  # its hooks run, and see what it takes and gives
            attributes = {name: v for name, v in attributes.items() if name != "forward"}
        elif any(True for _ in own_hooks(value)):
            raise _NotReadable
        self.visit(type(value))
        self.visit(type(value).forward)
        for members in (value._parameters, value._buffers, value._modules):
            self._all("held", itertools.chain.from_iterable(members.items()))
        for name, attribute in attributes.items():
            if name not in _OF_MODULES:
                self.kind.append(name)
                self.visit(attribute)

    def _function(self, value: types.FunctionType) -> None:
        """Its closure, and what it reads of its module's variables that are plain."""
        self.kind.append(id(value.__code__))
        self._all("closure", value.__closure__ or ())
        for name in value.__code__.co_names:
            variable = value.__globals__.get(name)
            if isinstance(variable, PLAIN | list | dict | set) and variable is not None:
                self.kind.append(name)
                self.visit(variable)

    def _cell(self, value: types.CellType) -> None:
        try:
            self.visit(value.cell_contents)
        except ValueError:
            self.kind.append("empty")

    def _object(self, value: object) -> None:
        """Objects that are more than values have to be the same ones, and in the same state."""
        self.kind.append(id(value))
        wrapped = getattr(value, "__wrapped__", None)
        if not self._attributes(value) and wrapped is None and type(value) is not object:
            raise _NotReadable

    def _attributes(self, value: object) -> bool:
        """Visit the attributes; True if the type can have any."""
        names = [n for kind in type(value).__mro__ for n in vars(kind).get("__slots__", ())]
        attributes = dict(getattr(value, "__dict__", {}))
        attributes |= {name: getattr(value, name) for name in names if hasattr(value, name)}
        for name, attribute in attributes.items():
            self.kind.append(name)
            self.visit(attribute)
        return hasattr(value, "__dict__") or bool(names)
