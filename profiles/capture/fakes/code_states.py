"""State that a forward changes in its code, outside of the objects that a model leads to.

Global names of the files that define its classes, attributes of those classes, what their functions
and hooks close over, are bound to and have as defaults, iterators, and results that
`functools.lru_cache` remembers. A look at a model leaves fake tensors there, or counts: a mask that
was made once for all would be a fake one in the training.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, GeneratorType, MethodType, MethodWrapperType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from profiles.capture.fakes.iterators import is_iterator, iterator_like, place_of
from profiles.capture.fakes.object_states import (
    MOST_BYTES,
    NOT_OWN,
    ObjectState,
    generator_states,
    object_states,
)
from profiles.errors import ModelError
from profiles.torch_compat import tensors_in, version_of

_CONTAINERS = frozenset((list, dict, set, deque, OrderedDict, defaultdict, Counter))
"""Classes whose items are theirs alone: those of the user's own may make them when asked."""
_DEPTH = 3
"""Containers in containers that are looked into."""
_MOST_ITEMS = 10_000
"""Of a container that may be a state; a larger one is data."""
_FIXED = (type, FunctionType, ModuleType, classmethod, staticmethod, property)
_REMEMBERS = type(functools.lru_cache(lambda: None))
_CODE = (FunctionType, MethodType, MethodWrapperType, functools.partial, _REMEMBERS, GeneratorType)
Put = Callable[[Any], object]


@contextmanager
def unchanged_code(runs: Iterable[object]) -> Iterator[None]:
    """Put back at the end what the code of these modules, of those in them, and of these functions
    has by now.

    Raises:
        ModelError: their code took from a generator, which cannot be put back.
    """
    states = CodeStates(runs)
    try:
        yield
    finally:
        states.restore()
    states.require_place()


def generators_of(runs: Sequence[object]) -> list[ObjectState]:
    """Of the random generators that these modules, those in them, and these functions hold."""
    modules = [m for each in runs if isinstance(each, nn.Module) for m in each.modules()]
    states = object_states(map(vars, modules))
    return [state for state in (*states, *CodeStates(runs).states) if state.is_generator]


class CodeStates:
    """State of the code of these modules, of those in them, and of these functions, by now.

    Attributes:
        states: of objects and random generators.
    """

    def __init__(self, runs: Iterable[object]) -> None:
        runs = list(runs)
        modules = [m for each in runs if isinstance(each, nn.Module) for m in each.modules()]
        functions = [each for each in runs if not isinstance(each, nn.Module)]
        kinds = {kind for each in (*modules, *functions) for kind in type(each).__mro__}
        own = sorted((k for k in kinds if _is_own(k.__module__)), key=lambda k: k.__qualname__)
        files = _files({kind.__module__ for kind in own} | set(map(_file_of, functions)))
        self._files = {file.__name__ for file in files}
        self._undo: list[Callable[[], object]] = []
        self._known: set[int] = set()
        self._objects: set[int] = set()
        self._names: list[Mapping[str, Any]] = []
        self._containers: list[Any] = []
        self.states: list[ObjectState] = []
        self._iterators: dict[int, _Iterator] = {}
        code = [*functions, *(value for kind in own for value in vars(kind).values())]
        # Of a script that `mp.spawn` ran they are not those of its module.
        used = [f.__globals__ for f in code if type(f) is FunctionType and _is_own(f.__module__)]
        for names in {id(names): names for names in (*map(vars, files), *used)}.values():
            self._note_names(names, names.__setitem__, names.__delitem__)
        for kind in own:
            self._note_names(
                vars(kind), functools.partial(setattr, kind), functools.partial(delattr, kind)
            )
        for module in modules:
            hooks = [value for value in vars(module).values() if isinstance(value, dict)]
            for names in (vars(module), *hooks):
                for name, item in names.items():
                    if isinstance(item, _CODE):
                        self._note(item, put=functools.partial(names.__setitem__, name))
        for function in functions:
            self._note_reached(function)

    def restore(self) -> None:
        """Put it back; as often as it is called."""
        for undo in self._undo:
            undo()
        for iterator in self._iterators.values():  # some into parts of states
            iterator.restore()
        for state in self.states:
            if not (state.has_items and _is_same(state.now().part, state.part)):
                state.put(state.part)

    def tensors(self) -> list[Tensor]:
        """The tensors that its names, containers and objects lead to by now."""
        of_names = [
            value
            for names in self._names
            for value in names.values()
            if isinstance(value, Tensor)
            or (type(value) in _CONTAINERS and len(value) <= _MOST_ITEMS)
        ]
        return tensors_in([of_names, self._containers, [state.part for state in self.states]])

    def require_place(self) -> None:
        """Require that no generator is elsewhere.

        Raises:
            ModelError: one is.
        """
        for iterator in self._iterators.values():
            if iterator.is_elsewhere():
                raise ModelError(
                    f"the forward takes from the iterator `{iterator.name}`: it runs on copies of"
                    " the model before the training, and this one cannot be put back",
                    hints=[
                        "count in an attribute of the module, or take from an iterator of a list"
                        " or of itertools that a name stands for; generators are running code"
                    ],
                )

    def _note_names(
        self,
        names: Mapping[str, Any],
        put: Callable[[str, Any], object],
        remove: Callable[[str], object],
    ) -> None:
        self._names.append(names)
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
        self.states += generator_states(before)
        for name, value in before.items():
            if type(value).__module__ in self._files and not isinstance(value, nn.Module):
                self._note_object(value)
            else:
                self._note(value, put=functools.partial(put, name))

    def _note(self, value: Any, depth: int = _DEPTH, *, put: Put | None = None) -> None:
        value = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if is_iterator(value):
            known = self._iterators.setdefault(id(value), _Iterator(value))
            if put is not None:
                known.puts.append(put)
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
        elif isinstance(value, MethodWrapperType):  # `count().__next__`
            of_own = put and functools.partial(_put_bound, put, value.__name__)
            self._note_reached(value.__self__, put=of_own)
        elif isinstance(value, MethodType):
            self._note(value.__func__)
            self._note_reached(value.__self__)
        elif isinstance(value, functools.partial):
            self._known.add(id(value))
            for part in (value.func, *value.args, *value.keywords.values()):
                self._note_reached(part)
        elif isinstance(value, Tensor):
            self._note_tensor(value)
        elif depth and type(value) in _CONTAINERS and len(value) <= _MOST_ITEMS:
            self._known.add(id(value))
            self._note_container(value)
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for place, item in list(items):
                if isinstance(item, Tensor) or type(item) in _CONTAINERS or is_iterator(item):
                    put_item = None if isinstance(value, set) else value.__setitem__
                    put = put_item and functools.partial(put_item, place)
                    self._note(item, depth - 1, put=put)

    def _note_function(self, function: FunctionType) -> None:
        for number, value in enumerate(function.__defaults__ or ()):
            self._note_reached(value, put=functools.partial(_put_default, function, number))
        named = function.__kwdefaults__ or {}
        for name, value in named.items():
            self._note_reached(value, put=functools.partial(named.__setitem__, name))
        self._note_container(vars(function))
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # empty as yet
                continue
            put = functools.partial(setattr, cell, "cell_contents")
            if not isinstance(value, _FIXED):
                self._undo.append(functools.partial(put, value))
            self._note_reached(value, put=put)

    def _note_reached(self, value: Any, *, put: Put | None = None) -> None:
        """Note what code leads to."""
        if not isinstance(value, (type, ModuleType, nn.Module)):
            self._note_object(value)
            self._note(value, put=put)

    def _note_object(self, value: Any) -> None:
        """Note an object of the user's own, or a random generator, and those in it."""
        if id(value) in self._objects or isinstance(value, (*_CODE, Tensor)):
            return
        self._objects.add(id(value))
        for state in object_states([{"": value}]):
            self.states.append(state)
            if state.has_items and isinstance(state.part, dict):
                for name, item in state.part.items():
                    put = functools.partial(state.part.__setitem__, name)
                    self._note(item, put=put)

    def _note_container(self, container: Any) -> None:
        items = container.copy()
        self._containers.append(container)

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


class _Iterator:
    """An iterator that code takes from, and how to put another one in its places."""

    def __init__(self, value: Any) -> None:
        self.name = getattr(value, "__qualname__", type(value).__name__)
        self.puts: list[Put] = []
        self._first = self._now = value
        self._like, self._place = iterator_like(value), place_of(value)

    def restore(self) -> None:
        if self.puts and self.is_elsewhere():
            self._now = iterator_like(self._like)
        if self._now is not self._first:
            for put in self.puts:
                put(self._now)

    def is_elsewhere(self) -> bool:
        return place_of(self._now) != self._place


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


def _put_bound(put: Put, name: str, value: object) -> None:
    put(getattr(value, name))


def _put_default(function: FunctionType, number: int, value: object) -> None:
    before = function.__defaults__ or ()
    function.__defaults__ = (*before[:number], value, *before[number + 1 :])


def _file_of(function: object) -> str:
    """The module of Python with a function's code; of a method or an object, with its class's."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", ""))


def _files(names: Iterable[str]) -> list[ModuleType]:
    """The modules of Python with these names, and those that they refer to or have functions of."""
    files = {name: sys.modules[name] for name in sorted(names) if name in sys.modules}
    for file in list(files.values()):
        for value in list(vars(file).values()):
            name = getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", 0)
            is_code = isinstance(value, ModuleType | FunctionType | _REMEMBERS)
            if is_code and isinstance(name, str) and _is_own(name) and name in sys.modules:
                files.setdefault(name, sys.modules[name])
    return list(files.values())


def _is_own(name: str | None) -> bool:
    """True for a module of Python that is neither its own, torch's nor ours; None for functions of
    code that was run without one (`exec`)."""
    return (name or "").partition(".")[0] not in NOT_OWN
