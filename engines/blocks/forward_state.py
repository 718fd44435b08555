"""State that a forward changes, for a forward that runs twice: a block that is computed again, code
between units on a rank with two stages.

Buffers and plain attributes of modules (moments, counters, temperatures, caches) may be changed in
place or replaced, and lists, dicts and sets that are attributes may get other items. The second run
sees them as the first one did, and leaves no trace.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from profiles.torch_compat import is_batch_norm, version_of

OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of every module: parameters, modules and hooks; buffers are looked at apart."""
_ABSENT = object()
_CONTAINERS = (list, dict, set, deque)


class ForwardState:
    """Of one call: `first` is around its first run, `second` around each other one.

    Args:
        modules: a block's, or others whose state a forward may change.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = modules
        self._before: list[tuple[dict[str, Any], str, object]] = []

    @contextmanager
    def first(self) -> Iterator[None]:
        """Note what the run changes, as it was."""
        known = [(names, _own(names)) for names in _holders(self._modules)]
        every = [value for _, before in known for value in before.values()]
        values = {id(t): (t, version_of(t), t.clone()) for t in filter(_may_be_written, every)}
        containers = {id(c): (c, copy.copy(c)) for c in filter(_may_be_filled, every)}
        try:
            yield
        finally:
            for names, before in known:
                self._note_changes(names, before, values, containers)

    def _note_changes(
        self,
        names: dict[str, Any],
        before: dict[str, object],
        values: dict[int, tuple[Tensor, int, Tensor]],
        containers: dict[int, tuple[Any, Any]],
    ) -> None:
        for name, value in before.items():
            tensor, version, clone = values.get(id(value), (None, 0, None))
            container, items = containers.get(id(value), (None, None))
            if tensor is not None and version_of(tensor) != version:
                self._before.append((names, name, clone))
            elif container is not None and not _has_same(container, items):
                self._before.append((names, name, items))
            elif names.get(name, _ABSENT) is not value and not _has_graph(value):
                self._before.append((names, name, value))
        self._before += [(names, name, _ABSENT) for name in _own(names).keys() - before.keys()]

    @contextmanager
    def second(self) -> Iterator[None]:
        """Run with what was noted. In place of a tensor or container that was changed there is
        another one: the second run may change it too, and what others keep of the first stays
        valid."""
        now = [(names, name, names.get(name, _ABSENT)) for names, name, _ in self._before]
        with torch.no_grad():
            copies: dict[int, object] = {
                id(v): v.clone() if isinstance(v, Tensor) else copy.copy(v)
                for _, _, v in self._before
                if isinstance(v, (Tensor, *_CONTAINERS))
            }
        _put((names, name, copies.get(id(value), value)) for names, name, value in self._before)
        try:
            yield
        finally:
            _put(iter(now))


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


def _own(names: dict[str, Any]) -> dict[str, Any]:
    """Those that torch did not give to every module."""
    return {name: value for name, value in names.items() if name not in OF_TORCH}


def _may_be_written(value: object) -> bool:
    """True for a tensor that a forward might write into. Masks it does not, nor results of an
    earlier one."""
    if not isinstance(value, Tensor) or _has_graph(value):
        return False
    return value.dtype != torch.bool or value.numel() == 1


def _may_be_filled(value: object) -> bool:
    """True for a container whose items a forward might change; not of results of an earlier one."""
    if not isinstance(value, _CONTAINERS):
        return False
    return not any(map(_has_graph, value.values() if isinstance(value, dict) else value))


def _has_same(container: Any, items: Any) -> bool:
    """True if a container has the items of its copy, in their order."""
    if len(container) != len(items):
        return False
    pairs = [(c.items() if isinstance(c, dict) else c) for c in (container, items)]
    if isinstance(container, dict):
        return all(
            one[0] == other[0] and one[1] is other[1] for one, other in zip(*pairs, strict=True)
        )
    return all(one is other for one, other in zip(*pairs, strict=True))


def _has_graph(value: object) -> bool:
    """True for what autograd follows: it belongs to one forward, and is no state of the next."""
    return isinstance(value, Tensor) and value.requires_grad
