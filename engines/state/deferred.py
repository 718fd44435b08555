"""Deferred construction: a constructor is recorded, and replayed for one parameter at a time.

As torchdistx's `deferred_init` did it for torch 1. Parameters are on the meta device as soon as
they are registered; everything else has its values, so that constructors may look at them, and
buffers (rotary tables, masks) are right. What a constructor does to parameters (`reset_parameters`,
`_init_weights`, factors, ties) is a list of operations on memory, and `values` runs those again
that one parameter depends on.

Random draws are seeded by their number in that list, so that a rank draws for its own parameters
alone and all ranks, under any plan, get the same. They are not those of eager construction: these
follow from one generator, and the thousandth can be known only by whoever drew all before it. Draws
from a generator of the constructor's own are repeated to the bit.
"""

from __future__ import annotations

import bisect
import hashlib
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from profiles.errors import ModelError
from profiles.torch_compat import TorchDispatchMode, tree_map_only

_CONSTRUCTIONS: WeakKeyDictionary[nn.Module, Construction] = WeakKeyDictionary()
"""The construction of a module, or of some of its parts: copies are made without a word."""


@contextmanager
def deferred() -> Iterator[None]:
    """Inside, modules are built without memory for their parameters.

        with advisor.deferred():
            model = Model(config)
        parallel = auto_parallelize(model, ...)  # each rank makes what it keeps

    `auto_parallelize(lambda: Model(config), ...)` is the same. Whatever the plan, a rank's main
    memory holds its shards and one parameter. Without `weights=` parameters get the values that
    the constructor gives them, the same under every plan, from the `seed` of the run.

    Raises:
        ModelError: the constructor reads the value of a parameter.
    """
    construction = Construction()
    hooks = (
        register_module_parameter_registration_hook(construction.register),  # type: ignore[arg-type]
        register_module_module_registration_hook(construction.note),
    )
    try:
        with construction, _InitFunctions(construction):
            yield
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error).lower():
            raise
        raise ModelError(
            "the constructor reads the value of a parameter, which is not made yet:"
            f" {str(error).splitlines()[0]}",
            where="advisor.deferred()",
            hints=["build the model without `deferred()`: each rank then has the whole of it"],
        ) from error
    finally:
        for hook in hooks:
            hook.remove()


def recipes_of(model: nn.Module) -> dict[Tensor, Recipe]:
    """The recipes of tensors of `model` that have no values yet."""
    constructions = {
        construction
        for module in model.modules()
        if (construction := _CONSTRUCTIONS.get(module)) is not None
    }
    return {
        tensor: Recipe(construction, construction.place(tensor))
        for tensor in (*model.parameters(), *model.buffers())
        for construction in constructions
        if tensor.is_meta and construction.made(tensor)
    }


@dataclass(frozen=True, slots=True)
class Recipe:
    """The operations that make one tensor."""

    construction: Construction
    place: Place

    def values(self, seed: int) -> Tensor:
        """The tensor, on the CPU; NaN where nothing was written."""
        return self.construction.replay(self.place, seed)


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor as elements of a storage."""

    storage: StorageWeakRef
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Call:
    """An operation, with places for its tensors.

    `reads` and `writes` are storages; those that it makes are written.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    results: Any
    reads: set[StorageWeakRef]
    writes: set[StorageWeakRef]

    @property
    def is_random(self) -> bool:
        """True if it may draw; a function of `torch.nn.init` has no tags."""
        tags = getattr(self.function, "tags", None)
        return tags is None or torch.Tag.nondeterministic_seeded in tags


class _InitFunctions(TorchFunctionMode):
    """Functions of Python that know the meta device.

    Some of `torch.nn.init` look at values, and so do nothing there: they are repeated as a whole.
    `parameter.data = tensor` wants both on one device.
    """

    def __init__(self, construction: Construction) -> None:
        super().__init__()
        self._construction = construction

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if function == _SET_DATA and args[0].is_meta:
            args = (args[0], args[1].to("meta"))
        result = function(*args, **(kwargs or {}))
        if result is True and function == _IS_META:
            frame = sys._getframe(1)
            if frame.f_globals.get("__name__") == nn.init.__name__:
                names = inspect.getargs(frame.f_code).args
                given = {name: frame.f_locals[name] for name in names}
                self._construction.note_whole(
                    getattr(nn.init, frame.f_code.co_name), given, args[0]
                )
        return result


_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class Construction(TorchDispatchMode):
    """Operations in their order, by the storages that they read and write.

    A view is no operation here: it is another place in the same storage.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[_Call] = []
        self._writers: dict[StorageWeakRef, list[int]] = defaultdict(list)
        self._given: dict[StorageWeakRef, Tensor] = {}  # made elsewhere: as they came
        self._same: dict[StorageWeakRef, StorageWeakRef] = {}  # of the parameter, of its values
        self._registered: dict[StorageWeakRef, nn.Parameter] = {}
        self._is_paused = False

    def __exit__(self, *error: Any) -> None:
        self._registered.clear()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def register(
        self, module: nn.Module, name: str, parameter: nn.Parameter | None
    ) -> nn.Parameter | None:
        """Put a parameter that is registered on the meta device; torch's hook."""
        if parameter is None or type(parameter) is not nn.Parameter or parameter.is_sparse:
            return None
        _CONSTRUCTIONS[module] = self
        if parameter.is_meta:
            return None
        key = StorageWeakRef(parameter.untyped_storage())
        known = self._registered.get(key)
        if known is not None and known.shape == parameter.shape:
            return known
        whole = parameter.untyped_storage().nbytes() == parameter.nbytes
        if not whole or not parameter.is_contiguous():
            with torch.no_grad():  # a part of something else: the copy is an operation
                return nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        self._keep_given(parameter, is_written=False)
        with self._paused():
            meta = torch.empty_like(parameter, device="meta")
        self._same[StorageWeakRef(meta.untyped_storage())] = self._key(parameter)
        self._registered[key] = made = nn.Parameter(meta, parameter.requires_grad)
        vars(made).update(vars(parameter))
        return made

    def note(self, module: nn.Module, name: str, part: nn.Module | None) -> None:
        """Note a part of a module; torch's hook."""
        _CONSTRUCTIONS[module] = self

    def made(self, tensor: Tensor) -> bool:
        """True if the tensor's values are known here."""
        key = self._key(tensor)
        return key in self._writers or key in self._given

    def place(self, tensor: Tensor) -> Place:
        """The place of a tensor."""
        size, stride = tuple(tensor.size()), tuple(tensor.stride())
        offset = int(tensor.storage_offset())
        return Place(self._key(tensor), size, stride, offset, tensor.dtype)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        if self._is_paused:
            return function(*args, **kwargs)
        written = {
            self._key(value)
            for argument, value in _named(function, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
            for value in _tensors(value)
        }
        before = [*_tensors(args), *_tensors(kwargs)]
        reads = {self._key(tensor) for tensor in before}
        for tensor in before:
            self._keep_given(tensor, is_written=self._key(tensor) in written)
        held_args, held_kwargs = self._held((args, kwargs))
        results = function(*args, **kwargs)
        made = {self._key(tensor) for tensor in _tensors(results)} - reads
        if written or made:
            places = self._held(results)
            self._add(_Call(function, held_args, held_kwargs, places, reads, written | made))
        return results

    def note_whole(self, function: Callable[..., Any], given: dict[str, Any], made: Tensor) -> None:
        """Note a function that fills the tensor `made`."""
        key = self._key(made)
        self._add(_Call(function, (), self._held(given), self.place(made), {key}, {key}))

    def _add(self, call: _Call) -> None:
        for key in call.writes:
            self._writers[key].append(len(self._calls))
        self._calls.append(call)

    def _held(self, tree: Any) -> Any:
        """`tree` without its tensors, and with generators as they are now."""
        return tree_map_only(torch.Generator, _copied, tree_map_only(Tensor, self.place, tree))

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _key(self, tensor: Tensor) -> StorageWeakRef:
        key = StorageWeakRef(tensor.untyped_storage())
        return self._same.get(key, key)

    def _keep_given(self, tensor: Tensor, *, is_written: bool) -> None:
        """A tensor that no operation here made (of NumPy, or from before) is kept as it came."""
        key = self._key(tensor)
        if key in self._writers or tensor.is_meta:
            return
        if is_written or key not in self._given:
            with self._paused():
                given = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                self._given[key] = given.clone() if is_written else given

    @torch.no_grad()
    def replay(self, wanted: Place, seed: int) -> Tensor:
        """Run the operations again that a place depends on, on the CPU."""
        memory: dict[StorageWeakRef, torch.UntypedStorage] = {}

        def real(place: Place) -> Tensor:
            if place.storage not in memory:
                given = self._given[place.storage].clone()
                memory[place.storage] = given.untyped_storage()
            return torch.empty(0, dtype=place.dtype).set_(
                memory[place.storage], place.offset, place.size, place.stride
            )

        with torch.random.fork_rng(devices=[]):
            for number in self._needed(wanted.storage):
                call = self._calls[number]
                args, kwargs = tree_map_only(Place, real, (call.args, dict(call.kwargs)))
                args, kwargs = tree_map_only(torch.Generator, _copied, (args, kwargs))
                if "device" in kwargs:
                    kwargs["device"] = torch.device("cpu")
                if kwargs.get("pin_memory"):
                    kwargs["pin_memory"] = False
                if call.is_random:
                    torch.default_generator.manual_seed(_seed_of(f"{seed} {number}"))
                results = call.function(*args, **kwargs)
                for result, place in zip(_tensors(results), _places(call.results), strict=True):
                    if place.storage not in memory:
                        memory[place.storage] = _laid_out(result, place, call).untyped_storage()
                del args, kwargs, results
        return real(wanted)

    def _needed(self, storage: StorageWeakRef) -> list[int]:
        """Numbers of the operations that make the present content of a storage."""
        needed: set[int] = set()
        seen: dict[StorageWeakRef, int] = {}
        left = [(storage, len(self._calls))]
        while left:
            key, before = left.pop()
            if seen.get(key, -1) >= before:
                continue
            start, seen[key] = seen.get(key, 0), before
            writers = self._writers.get(key, [])
            first, last = (bisect.bisect_left(writers, end) for end in (start, before))
            for number in writers[first:last]:
                if number not in needed:
                    needed.add(number)
                    left.extend((read, number) for read in self._calls[number].reads)
        return sorted(needed)


def _named(function: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """The arguments of a call with their declarations."""
    declared = function._schema.arguments
    yield from zip(declared, args, strict=False)
    yield from ((each, kwargs[each.name]) for each in declared if each.name in kwargs)


def _tensors(tree: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    tree_map_only(Tensor, tensors.append, tree)
    return tensors


def _places(tree: Any) -> list[Place]:
    places: list[Place] = []
    tree_map_only(Place, places.append, tree)
    return places


def _copied(generator: torch.Generator) -> torch.Generator:
    """A generator in the same state, which the original leaves."""
    same = torch.Generator(generator.device)
    same.set_state(generator.get_state())
    return same


def _laid_out(result: Tensor, place: Place, call: _Call) -> Tensor:
    """A tensor in memory of its own, as it was laid out when the call was recorded; NaN where the
    call gives memory alone, so that a parameter that nobody fills is found."""
    is_blank = call.function.__name__.startswith(("empty", "new_empty"))
    extent = (
        place.offset + 1 + sum((n - 1) * s for n, s in zip(place.size, place.stride, strict=True))
    )
    if is_blank and result.is_floating_point():
        result.fill_(torch.nan)
    if tuple(result.stride()) == place.stride and result.storage_offset() == place.offset:
        return result
    memory = torch.empty(extent if result.numel() else 0, dtype=result.dtype)
    return memory.as_strided(place.size, place.stride, place.offset).copy_(result)


def _seed_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
