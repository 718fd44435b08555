"""Objects of the user's own classes that modules keep: counters, caches, settings.

A forward changes them as it changes attributes of modules, so whoever restores these restores
those.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

DEPTH = 2
"""Objects that are attributes of a module, and those in them. A trainer or a data set that an
object leads to is no state of a forward, and may lead to all of a program."""
_NOT_OWN = sys.stdlib_module_names | {"numpy", "torch", "advisor", "engines", "profiles"}
_NO_STATE = (type, FunctionType, MethodType, Tensor, nn.Module)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)


def own_objects(attributes: Iterable[Mapping[str, object]]) -> Iterator[dict[str, Any]]:
    """The attributes of objects that are among these or in containers of theirs, each once."""
    known: set[int] = set()
    level = [value for names in attributes for value in names.values()]
    for _ in range(DEPTH):
        below: list[object] = []
        for value in _items(level, known):
            yield vars(value)
            below += vars(value).values()
        level = below


def _items(values: list[object], known: set[int]) -> Iterator[object]:
    while values:
        value = values.pop()
        is_container = isinstance(value, _CONTAINERS)
        if not (is_container or is_own(value)) or id(value) in known:
            continue
        known.add(id(value))
        if isinstance(value, _CONTAINERS):
            values += value.values() if isinstance(value, dict) else value
        if is_own(value):
            yield value


def is_own(value: object) -> bool:
    """True for an object with attributes, of a class that is neither Python's, torch's nor ours."""
    kind = type(value)
    if kind.__module__.partition(".")[0] in _NOT_OWN and kind is not SimpleNamespace:
        return False
    return type(getattr(value, "__dict__", None)) is dict and not isinstance(value, _NO_STATE)
