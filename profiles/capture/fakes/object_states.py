"""Objects that modules keep and that have a state of their own: counters, caches, settings,
generators, arrays.

A forward changes them as it changes attributes of modules, so whoever restores these restores
those.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

DEPTH = 2
"""Objects that are attributes of a module, and those in them. A trainer or a data set that an
object leads to is no state of a forward, and may lead to all of a program."""
MOST_BYTES = 2**20
"""Of an array that may be a state; a larger one is data."""
NOT_OWN = sys.stdlib_module_names | {"numpy", "torch", "advisor", "engines", "profiles"}
_NO_STATE = (type, FunctionType, MethodType, Tensor, nn.Module)
_PLAIN = frozenset({bool, int, float, str, type(None)})
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)


class _Kind(NamedTuple):
    """A kind of state: which objects have it, how it is taken and put back. What an object has by
    names or places is taken as a dict or a list."""

    has: Callable[[Any], bool]
    take: Callable[[Any], Any]
    put: Callable[[Any, Any], object]


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


def _put_attributes(value: object, attributes: dict[str, Any]) -> None:
    names = vars(value)
    for name in names.keys() - attributes.keys():
        del names[name]
    names.update(attributes)


def _slots(value: Any) -> dict[str, Any]:
    kind: Any = type(value)
    names = _slot_names(kind)
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


@functools.lru_cache(maxsize=4096)
def _slot_names(kind: type) -> tuple[str, ...]:
    declared = (getattr(each, "__slots__", ()) for each in kind.__mro__)
    names = (n for each in declared for n in ([each] if isinstance(each, str) else each))
    return tuple(name for name in names if name != "__dict__")


def _put_slots(value: object, attributes: dict[str, Any]) -> None:
    for name, item in attributes.items():
        object.__setattr__(value, name, item)


def _mapping(value: Any) -> dict[Any, Any]:
    """The items of a dict, by the methods of Python's classes: the user's may make them when asked,
    as those of transformers' activations do."""
    keys = OrderedDict.__iter__ if isinstance(value, OrderedDict) else dict.__iter__
    return {key: dict.__getitem__(value, key) for key in keys(value)}


def _sequence(value: Any) -> list[Any]:
    return list(list.__iter__(value) if isinstance(value, list) else deque.__iter__(value))


def _put_items(value: Any, items: Any) -> None:
    if isinstance(value, dict):
        kind_of_dict = OrderedDict if isinstance(value, OrderedDict) else dict
        kind_of_dict.clear(value)
        for key, item in items.items():
            kind_of_dict.__setitem__(value, key, item)
    else:
        kind = list if isinstance(value, list) else deque
        kind.clear(value)
        kind.extend(value, items)


def _put_array(value: Any, items: Any) -> None:
    value[...] = items


_ATTRIBUTES = _Kind(
    lambda v: type(getattr(v, "__dict__", None)) is dict, lambda v: {**vars(v)}, _put_attributes
)
_OF_OWN = (
    _ATTRIBUTES,
    _Kind(lambda v: bool(_slots(v)), _slots, _put_slots),
    _Kind(lambda v: isinstance(v, dict), _mapping, _put_items),
    _Kind(lambda v: isinstance(v, list | deque), _sequence, _put_items),
)
_GENERATORS = (
    _Kind(_is(torch.Generator), lambda v: v.get_state(), lambda v, state: v.set_state(state)),
    _Kind(_is(random.Random), lambda v: v.getstate(), lambda v, state: v.setstate(state)),
    _Kind(_is(np.random.RandomState), lambda v: v.get_state(), lambda v, s: v.set_state(s)),
    _Kind(
        _is(np.random.Generator),
        lambda v: v.bit_generator.state,
        lambda v, state: setattr(v.bit_generator, "state", state),
    ),
)
_OF_OTHERS = (
    *_GENERATORS,
    _Kind(
        lambda v: isinstance(v, np.ndarray) and v.nbytes <= MOST_BYTES and v.flags.writeable,
        np.copy,
        _put_array,
    ),
)


class ObjectState:
    """A state of an object, now: its `part`, and how to put such back."""

    def __init__(self, value: object, kind: _Kind) -> None:
        self._value, self._kind = value, kind
        self.part = kind.take(value)

    def put(self, part: Any) -> None:
        """Give it to the object."""
        self._kind.put(self._value, part)

    def now(self) -> ObjectState:
        """The same state as it is by now."""
        return ObjectState(self._value, self._kind)

    @property
    def kind(self) -> str:
        """The class of the object."""
        return type(self._value).__qualname__

    @property
    def is_generator(self) -> bool:
        """True if it is that of a random generator."""
        return self._kind in _GENERATORS

    @property
    def has_items(self) -> bool:
        """True if it is attributes or items, and not a state of its own kind."""
        return self._kind in _OF_OWN

    @property
    def names(self) -> dict[str, Any] | None:
        """Its attributes themselves, where it is those."""
        return vars(self._value) if self._kind is _ATTRIBUTES else None


def object_states(attributes: Iterable[Mapping[str, object]]) -> list[ObjectState]:
    """Of the objects that are among these or in containers of theirs, each once."""
    known: set[int] = set()
    states: list[ObjectState] = []
    level = [value for names in attributes for value in names.values()]
    for _ in range(DEPTH):
        new = [
            ObjectState(value, kind)
            for value in _items(level, known)
            for kind in (_OF_OWN if _is_own(value) else _OF_OTHERS)
            if kind.has(value)
        ]
        states += new
        level = [value for state in new for value in _in_part(state.part)]
    return states


def generator_states(attributes: Mapping[str, object]) -> list[ObjectState]:
    """Of the random generators among these, in their order."""
    return [
        ObjectState(value, kind)
        for value in attributes.values()
        for kind in _GENERATORS
        if kind.has(value)
    ]


def _in_part(part: object) -> Iterable[object]:
    if type(part) is dict:
        return part.values()
    return part if type(part) is list else ()


def _items(values: list[object], known: set[int]) -> Iterator[object]:
    """Those that may have a state, and those in containers."""
    while values:
        value = values.pop()
        if type(value) in _PLAIN or isinstance(value, _NO_STATE) or id(value) in known:
            continue
        known.add(id(value))
        if isinstance(value, _CONTAINERS):
            values += value.values() if isinstance(value, dict) else value
        yield value


def _is_own(value: object) -> bool:
    """True for an object of a class that is neither Python's, torch's nor ours."""
    kind = type(value)
    return kind is SimpleNamespace or kind.__module__.partition(".")[0] not in NOT_OWN
