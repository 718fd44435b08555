"""State that a forward changes, for a forward that runs twice: a block that is computed again, code
between units on a rank with two stages.

Buffers and plain attributes of modules, and of objects that they keep (moments, counters,
temperatures, caches), may be changed in place or replaced, lists, dicts and sets that are
attributes may get other items, also those in tuples, hooks may be added where an attribute says
that there are none yet, and generators may be drawn from: Python's and numpy's too. The second run
sees them as the first one did, and leaves no trace: also where others changed them since, such as a
model that puts a mask or a number on its blocks before each call.
"""

from __future__ import annotations

import copy
import functools
import random
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_
from types import FunctionType, MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from profiles.capture.fakes.object_states import ObjectState, object_states
from profiles.torch_compat import CALL, is_batch_norm, version_of

OF_TORCH = frozenset({*vars(nn.Module()), CALL}) - {"training"}
"""Attributes of every module: parameters, modules, hooks and how it is called; buffers are looked
at apart."""
_Hooks = dict[int, Callable[..., Any]]
_ABSENT = object()
_CONTAINERS = (list, dict, set, deque, tuple)
_PLAIN = frozenset(
    (bool, int, float, complex, str, bytes, type(None), FunctionType, torch.dtype, torch.Size)
)
_DEPTH = 3
"""Containers in containers that are looked into."""


class ForwardState:
    """Of one call: `first` is around its first run, `second` around each other one.

    Args:
        modules: a block's, or others whose state a forward may change.
        draws: it may draw from Python's or numpy's generators; to look takes 0.1 ms.
        given: arguments of the call that are no tensors: objects among them have a state too.
    """

    def __init__(
        self, modules: Iterable[nn.Module], *, draws: bool = True, given: Sequence[object] = ()
    ) -> None:
        self._modules = modules
        self._draws = draws
        self._given = given
        self._before: list[tuple[dict[str, Any], str, object]] = []
        self._objects: list[ObjectState] = []
        self._clones: list[Tensor] = []
        self._at_start: list[_Held] = []
        self._empty: list[dict[str, Any]] = []
        self._contents: dict[int, tuple[Any, Any]] = {}
        self._changed: set[tuple[int, str]] = set()
        self._hooks: list[tuple[_Hooks, _Hooks]] = []
        self._drawn: tuple[Any, Any] | None = None

    @contextmanager
    def first(self) -> Iterator[None]:
        """Note what the run changes, as it was."""
        holders = list(_holders(self._modules))
        known, empty = [_Held.of(n) for n in holders if n], [n for n in holders if not n]
        given = {str(place): value for place, value in enumerate(self._given)}
        saved = (each.attributes for each in known if not each.is_plain())
        objects = object_states(chain(saved, [given]))
        self._objects = [state for state in objects if state.names is None]
        known += [_Held.of(state.names) for state in objects if state.names is not None]
        every: list[Any] = [v for each in known for v in each.values if type(v) not in _PLAIN]
        contents = {id(c): (c, _copied(c)) for c in filter(_has_contents, every)}
        containers = {i: pair for i, pair in contents.items() if not _has_results(pair[1])}
        tensors = filter(_may_be_written, [*every, *_items(c for c, _ in containers.values())])
        values = {id(t): (t, version_of(t), t.clone()) for t in tensors}
        hooks = [(each, each.copy()) for each in _hooks(self._modules)]
        numbers = (random.getstate(), np.random.get_state(legacy=False)) if self._draws else None
        try:
            yield
        finally:
            self._hooks = [(each, old) for each, old in hooks if each.keys() != old.keys()]
            self._drawn = numbers if numbers is not None and _has_drawn(*numbers) else None
            written = {i: clone for i, (t, v, clone) in values.items() if version_of(t) != v}
            filled = {i: n for i, (c, n) in containers.items() if not _has_same(c, n, written)}
            changed = written.keys() | filled.keys()
            self._clones = list(written.values())
            for each in (*known, *_filled(empty)):
                if not (each.is_same() and changed.isdisjoint(map(id, each.values))):
                    self._note_changes(each.names, each.attributes, written, filled)
            self._at_start, self._empty = known, empty
            self._contents = {i: pair for i, pair in contents.items() if _has_same(*pair, written)}

    def _note_changes(
        self,
        names: dict[str, Any],
        before: dict[str, object],
        written: dict[int, Tensor],
        filled: dict[int, Any],
    ) -> None:
        """`written`, `filled`: tensors and containers as they were, by the ids of those that are
        not any more."""
        for name, value in before.items():
            if id(value) in written:
                self._before.append((names, name, written[id(value)]))
            elif id(value) in filled:
                self._before.append((names, name, _copied(filled[id(value)], written)))
            elif names.get(name, _ABSENT) is not value:
                self._changed.add((id(names), name))
                if not _has_graph(value):
                    self._before.append((names, name, value))
        new = set(_own_keys(tuple(names))) - before.keys()
        self._before += [(names, name, _ABSENT) for name in new]
        self._changed.update((id(names), name) for names, name, _ in self._before)

    def _changed_since(self) -> Iterator[tuple[dict[str, Any], str, object]]:
        """Names that the first run left as they were, and others changed after it."""
        for names, keys, values in (*self._at_start, *_filled(self._empty)):
            for name, value in zip(keys, values, strict=True):
                container, items = self._contents.get(id(value), (value, value))
                first = value if _has_same(container, items, ()) else items
                if names.get(name, _ABSENT) is not first and (id(names), name) not in self._changed:
                    yield names, name, first
            for name in set(_own_keys(tuple(names))).difference(keys):
                if (id(names), name) not in self._changed:
                    yield names, name, _ABSENT

    @property
    def has_drawn(self) -> bool:
        """True if the first run drew from Python's or numpy's generators."""
        return self._drawn is not None

    @property
    def is_changed(self) -> bool:
        """True if the first run changed anything, or might have: of some objects that is not
        known."""
        return bool(self._before or self._objects)

    @property
    def changed(self) -> list[str]:
        """Names of what the first run changed for the next one, without results that it left."""
        return [name for names, name, old in self._before if _is_kept(old, names.get(name))]

    @contextmanager
    def second(self) -> Iterator[None]:
        """Run with what was noted. In place of a tensor or container that was changed there is
        another one: the second run may change it too, and what others keep of the first stays
        valid."""
        before = [*self._before, *self._changed_since()]
        now = [(names, name, names.get(name, _ABSENT)) for names, name, _ in before]
        with torch.no_grad():
            clones = {id(clone): clone.clone() for clone in self._clones}
            copies: dict[int, object] = {
                id(v): v.clone() if isinstance(v, Tensor) else _copied(v, clones)
                for _, _, v in before
                if isinstance(v, (Tensor, *_CONTAINERS)) and not _has_graph(v)
            }
        objects = [state.now() for state in self._objects]
        hooks = [(each, each.copy()) for each, _ in self._hooks]
        numbers = self._drawn and (random.getstate(), np.random.get_state(legacy=False))
        _draw_from(self._drawn)
        _put((names, name, copies.get(id(value), value)) for names, name, value in before)
        for state in self._objects:
            state.put(state.part)
        _put_hooks(self._hooks)
        try:
            yield
        finally:
            _put(iter(now))
            _put_hooks(hooks)
            for state in objects:
                state.put(state.part)
            _draw_from(numbers)


def _has_drawn(python: Any, array: Any) -> bool:
    """True if Python's or numpy's generator is not any more where it was."""
    now = np.random.get_state(legacy=False)
    is_same = now["state"]["pos"] == array["state"]["pos"] and np.array_equal(
        now["state"]["key"], array["state"]["key"]
    )
    return not is_same or now["has_gauss"] != array["has_gauss"] or random.getstate() != python


def _draw_from(numbers: tuple[Any, Any] | None) -> None:
    if numbers is not None:
        random.setstate(numbers[0])
        np.random.set_state(numbers[1])


def _is_kept(old: object, new: object) -> bool:
    if isinstance(old, Tensor):
        return isinstance(new, Tensor) and not _has_graph(new)
    if isinstance(old, bool | int | float | complex | str):
        return old != new
    return isinstance(old, _CONTAINERS)


def _put(values: Iterator[tuple[dict[str, Any], str, object]]) -> None:
    for names, name, value in values:
        if value is _ABSENT:
            names.pop(name, None)
        else:
            names[name] = value


def _holders(modules: Iterable[nn.Module]) -> Iterator[dict[str, Any]]:
    """The mappings of names that a forward may change. Batch norms are told not to count."""
    for module in modules:
        if not is_batch_norm(module):
            yield vars(module)
            yield module._buffers


def _hooks(modules: Iterable[nn.Module]) -> list[_Hooks]:
    return [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]


def _put_hooks(hooks: Iterable[tuple[_Hooks, _Hooks]]) -> None:
    for each, wanted in hooks:
        each.clear()
        each.update(wanted)


class _Held(NamedTuple):
    """Values that a mapping holds under names that torch did not give to every module.

    Every submodule is looked at around every call of a block: C code does most of it.
    """

    names: dict[str, Any]
    keys: tuple[str, ...]
    values: list[object]

    @classmethod
    def of(cls, names: dict[str, Any]) -> _Held:
        keys = _own_keys(tuple(names))
        return cls(names, keys, [names[key] for key in keys])

    @property
    def attributes(self) -> dict[str, object]:
        return dict(zip(self.keys, self.values, strict=True))

    def is_plain(self) -> bool:
        """True if nothing in it could change in place."""
        return _PLAIN.issuperset(map(type, self.values))

    def is_same(self) -> bool:
        keys = _own_keys(tuple(self.names))
        return keys == self.keys and all(map(is_, map(self.names.__getitem__, keys), self.values))


def _filled(empty: Iterable[dict[str, Any]]) -> Iterator[_Held]:
    """Those of mappings without names that got some since."""
    return (_Held(names, (), []) for names in empty if names)


@functools.lru_cache(maxsize=4096)
def _own_keys(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in OF_TORCH)


def _may_be_written(value: object) -> bool:
    """True for a tensor that a forward might write into. Masks it does not, nor results of an
    earlier one."""
    if not isinstance(value, Tensor) or _has_graph(value):
        return False
    return value.dtype != torch.bool or value.numel() == 1


def _has_contents(value: object) -> bool:
    """True for a container whose items might change."""
    if isinstance(value, tuple) and _PLAIN.issuperset(map(type, value)):  # a size, a stride
        return False
    return isinstance(value, _CONTAINERS)


def _has_results(container: object) -> bool:
    """True for a container of results of an earlier forward."""
    return any(map(_has_graph, _items([container])))


def _copied(
    value: Any, instead: Mapping[int, Tensor] = MappingProxyType({}), depth: int = _DEPTH
) -> Any:
    """A container with the same items, of which containers are copied too, and items `instead` of
    those with these ids."""
    if not depth or not isinstance(value, _CONTAINERS):
        return instead.get(id(value), value)
    if isinstance(value, tuple):
        items = [_copied(item, instead, depth - 1) for item in value]
        return tuple.__new__(type(value), items)
    other = copy.copy(value)
    if isinstance(other, set):
        return other
    places = other.items() if isinstance(other, dict) else enumerate(other)
    for place, item in list(places):
        other[place] = _copied(item, instead, depth - 1)
    return other


def _items(containers: Iterable[Any], depth: int = _DEPTH) -> Iterator[object]:
    for container in containers if depth else ():
        items = list(container.values() if isinstance(container, dict) else container)
        yield from items
        yield from _items((c for c in items if isinstance(c, _CONTAINERS)), depth - 1)


def _has_same(container: Any, items: Any, written: Container[int]) -> bool:
    """True if a container has the items of its copy, in their order, and none was written into."""
    if container is items or not isinstance(container, _CONTAINERS):
        return container is items and id(container) not in written
    if type(container) is not type(items) or len(container) != len(items):
        return False
    if isinstance(container, dict) and list(container) != list(items):
        return False
    pairs = zip(_items([container], 1), _items([items], 1), strict=True)
    return all(_has_same(one, other, written) for one, other in pairs)


def _has_graph(value: object) -> bool:
    """True for what autograd follows: it belongs to one forward, and is no state of the next."""
    return isinstance(value, Tensor) and value.requires_grad
