"""State that a forward changes in its code, outside of the objects that a model leads to.

Global names of the files that define its classes, attributes of those classes, what their functions
close over and have as defaults, and results that `functools.lru_cache` remembers. A look at a model
leaves fake tensors there, or counts: a mask that was made once for all would be a fake one in the
training.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from profiles.capture.fakes.object_states import (
    MOST_BYTES,
    NOT_OWN,
    ObjectState,
    generator_states,
)
from profiles.torch_compat import version_of

_CONTAINERS = frozenset((list, dict, set, deque, OrderedDict, defaultdict, Counter))
"""Classes whose items are theirs alone: those of the user's own may make them when asked."""
_DEPTH = 3
"""Containers in containers that are looked into."""
_MOST_ITEMS = 10_000
"""Of a container that may be a state; a larger one is data."""
_FIXED = (type, FunctionType, ModuleType, classmethod, staticmethod, property)
_REMEMBERS = type(functools.lru_cache(lambda: None))


@contextmanager
def unchanged_code(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put back at the end what the code of these modules, and of those in them, has by now."""
    states = CodeStates(part for module in modules for part in module.modules())
    try:
        yield
    finally:
        states.restore()


class CodeStates:
    """State of the code of these modules, as it is by now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        kinds = {kind for module in modules for kind in type(module).__mro__}
        own = sorted((k for k in kinds if _is_own(k.__module__)), key=lambda k: k.__qualname__)
        files = _files({kind.__module__ for kind in own})
        self._undo: list[Callable[[], object]] = []
        self._known: set[int] = set()
        self._generators: list[ObjectState] = []
        for file in files:
            names = vars(file)
            self._note_names(names, names.__setitem__, names.__delitem__)
        for kind in own:
            self._note_names(
                vars(kind), functools.partial(setattr, kind), functools.partial(delattr, kind)
            )

        for module in modules:
            for value in vars(module).values():
                if type(value) is FunctionType or isinstance(value, _REMEMBERS):
                    self._note(value)

    def restore(self) -> None:
        """Put it back."""
        for undo in self._undo:
            undo()
        for state in self._generators:
            state.put(state.part)

    def _note_names(
        self,
        names: Mapping[str, Any],
        put: Callable[[str, Any], object],
        remove: Callable[[str], object],
    ) -> None:
        before = {n: v for n, v in names.items() if not n.startswith("__")}

        def undo() -> None:
            for name, value in list(names.items()):
                if name.startswith("__") or isinstance(value, _FIXED):
                    continue
                if name not in before:
                    remove(name)
                elif value is not before[name]:
                    put(name, before[name])

        self._undo.append(undo)
        self._generators += generator_states(before)
        for value in before.values():
            self._note(value)

    def _note(self, value: Any, depth: int = _DEPTH) -> None:
        value = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if id(value) in self._known:
            return
        if isinstance(value, _REMEMBERS):
            self._known.add(id(value))
            misses = value.cache_info().misses
            self._undo.append(functools.partial(_forget, value, misses))
            value = value.__wrapped__
        if type(value) is FunctionType:
            self._known.add(id(value))
            self._note_function(value)
        elif isinstance(value, Tensor):
            self._note_tensor(value)
        elif depth and type(value) in _CONTAINERS and len(value) <= _MOST_ITEMS:
            self._known.add(id(value))
            self._note_container(value)
            for item in list(value.values() if isinstance(value, dict) else value):
                if isinstance(item, Tensor) or type(item) in _CONTAINERS:
                    self._note(item, depth - 1)

    def _note_function(self, function: FunctionType) -> None:
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._note(value)
        self._note_container(vars(function))
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # empty as yet
                continue
            if not isinstance(value, _FIXED):
                self._undo.append(functools.partial(setattr, cell, "cell_contents", value))
            self._note(value)

    def _note_container(self, container: Any) -> None:
        items = container.copy()

        def undo() -> None:
            if _is_same(container, items):
                return
            container.clear()
            (container.update if isinstance(container, dict | set) else container.extend)(items)

        self._undo.append(undo)

    def _note_tensor(self, tensor: Tensor) -> None:
        if tensor.is_meta or tensor.layout is not torch.strided or tensor.nbytes > MOST_BYTES:
            return
        version, values = version_of(tensor), tensor.detach().clone()

        def undo() -> None:
            if version_of(tensor) != version:
                with torch.no_grad():
                    tensor.copy_(values)

        self._undo.append(undo)


def _is_same(container: Any, items: Any) -> bool:
    if isinstance(container, set):
        return bool(container == items)
    if isinstance(container, dict) and list(container) != list(items):
        return False
    pairs = zip(_values(container), _values(items), strict=False)
    return len(container) == len(items) and all(one is other for one, other in pairs)


def _values(container: Any) -> Iterator[Any]:
    return iter(container.values() if isinstance(container, dict) else container)


def _forget(cached: Any, misses: int) -> None:
    """Forget all results where some were new: there is no way to forget one. Results without
    tensors stay, of what is said once, say."""
    if cached.cache_info().misses != misses and _leads_to_tensor(gc.get_referents(cached)):
        cached.cache_clear()


def _leads_to_tensor(value: Any, depth: int = _DEPTH) -> bool:
    if isinstance(value, Tensor):
        return True
    if not depth or isinstance(value, (*_FIXED, nn.Module)):
        return False
    if isinstance(value, dict):
        return any(_leads_to_tensor(item, depth - 1) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_leads_to_tensor(item, depth - 1) for item in value)
    attributes = getattr(value, "__dict__", None)
    return _is_own(type(value).__module__) and _leads_to_tensor(attributes, depth)


def _files(names: Iterable[str]) -> list[ModuleType]:
    """The modules of Python with these names, and those that they refer to."""
    files = {name: sys.modules[name] for name in sorted(names) if name in sys.modules}
    for file in list(files.values()):
        for value in list(vars(file).values()):
            if isinstance(value, ModuleType) and _is_own(value.__name__):
                files.setdefault(value.__name__, value)
    return list(files.values())


def _is_own(name: str) -> bool:
    return name.partition(".")[0] not in NOT_OWN
