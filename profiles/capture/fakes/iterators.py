"""Iterators that a forward takes from: where they are, and others in the same place.

Those of Python and itertools say by `__reduce__` what they are made of; up to Python 3.13, for
itertools. A generator is running code, of which there is no other in the same place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import Any

_FILES = ("builtins", "itertools")


def is_iterator(value: object) -> bool:
    """True for an iterator of Python or itertools, or a generator."""
    return isinstance(value, Iterator) and type(value).__module__ in _FILES


def iterator_like(iterator: Any) -> Any:
    """Another one in the same place, over others where it takes from iterators; itself where
    there is no such thing."""
    parts = _parts(iterator)
    if parts is None:
        return iterator
    function, arguments, *state = parts
    make: Callable[..., Any] = function
    other = make(*map(_other, arguments))
    if state and state[0] is not None:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            other.__setstate__(_of_state(state[0]))
    return other


def place_of(iterator: Any) -> object:
    """A value that is another one when something has been taken from the iterator."""
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        if frame is None:
            return None
        inner = iterator.gi_yieldfrom
        names = tuple((name, id(value)) for name, value in frame.f_locals.items())
        return frame.f_lasti, names, place_of(inner) if is_iterator(inner) else None
    parts = _parts(iterator)
    return repr(iterator) if parts is None else _flat(parts)


def _parts(iterator: Any) -> tuple[Any, ...] | None:
    """A function, its arguments and perhaps a state, that make such an iterator."""
    try:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            parts = iterator.__reduce__()
    except TypeError:  # a generator; those of itertools from Python 3.14 on
        return None
    return parts if isinstance(parts, tuple) else None


def _other(value: object) -> object:
    return iterator_like(value) if is_iterator(value) else value


def _of_state(value: Any) -> Any:
    """A state whose lists, in which a cycle gathers what it has seen, are others too."""
    if type(value) is tuple:
        return tuple(map(_of_state, value))
    return list(value) if type(value) is list else _other(value)


def _flat(value: Any) -> object:
    if type(value) is tuple:
        return tuple(map(_flat, value))
    if type(value) in (bool, int, float, complex, str, range, type(None)):
        return value
    if is_iterator(value):
        return place_of(value)
    return len(value) if type(value) is list else id(value)  # some make a list of what is left
