"""Who does what during one forward and backward: operations, kept tensors and memory, by unit."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from profiles.model import GLUE
from profiles.modules import Unit
from profiles.operators import (
    flop_formulas,
    grouped_matmul,
    kept_operators,
    launches,
    moved_bytes,
)
from profiles.timeline import Timeline
from profiles.torch_compat import Operator, device_query, map_tensors, storage_of, tensors_in

_PLACE = "place"  # key in the metadata of autograd nodes


@dataclass(slots=True)
class Work:
    """What was run: see `UnitCost`."""

    flop: int = 0
    moved_bytes: int = 0
    kernels: int = 0


@dataclass(slots=True, eq=False)
class Place:
    """One call of a unit, or a stretch of code between two calls."""

    name: str
    is_block: bool = False
    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    input_bytes: int = 0
    output_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Storage:
    """Memory that the run allocated; `number` is its name in the timeline.

    `saved_by` keeps it for backward as the model is; `kept_by` would if blocks were recomputed
    selectively; `is_taken`: among the inputs of a block that came already.
    """

    number: int
    size_bytes: int
    is_alive: bool = True
    saved_by: Place | None = None
    kept_by: Place | None = None
    is_taken: bool = False


class Trace(TorchDispatchMode):
    """Watches operations below autograd, calls of units, and what autograd saves.

    A forward operation belongs to the unit that is being called; a backward operation to the unit
    whose forward made its autograd node. Everything else is glue, in one `Place` per stretch.

    Args:
        owned: units that hold a parameter, for the storages of all parameters.
        known: further storages that were there before: buffers, the batch.
        cast: dtype that floating inputs of units are cast to, as FSDP's mixed precision does.
        casts_are_parameters: a cast of a parameter is a parameter, not an activation (autocast).
    """

    def __init__(
        self,
        *,
        owned: Mapping[torch.UntypedStorage, frozenset[str]],
        known: Iterable[torch.UntypedStorage],
        cast: torch.dtype | None,
        casts_are_parameters: bool,
    ) -> None:
        super().__init__()
        self.place = Place(GLUE)
        self.places = [self.place]
        self.shared: set[str] = set()
        self.timeline = Timeline()
        self.in_backward = False
        self.strangers: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._outer: list[Place] = []
        self._owned = {id(storage): names for storage, names in owned.items()}
        self._known = {id(storage): storage for storage in (*owned, *known)}
        self._live: dict[int, tuple[_Storage, weakref.ref[torch.UntypedStorage]]] = {}
        self._storages: list[_Storage] = []
        self._cast, self._casts_are_parameters = cast, casts_are_parameters
        self._formulas = flop_formulas()
        self._kept_operators = frozenset(kept_operators())
        self._device_query = device_query()
        self.timeline.open((self.place, False))

    # Calls of units

    def watch(self, model: nn.Module, units: Sequence[Unit]) -> None:
        """Hook the modules. Their attributes are copies that go, so the hooks go too."""
        model.register_forward_pre_hook(self._cast_inputs, with_kwargs=True)
        for unit in units:
            unit.module.register_forward_pre_hook(self._before(unit), with_kwargs=True)
            unit.module.register_forward_hook(self._after, with_kwargs=True)

    def _before(self, unit: Unit) -> Callable[..., tuple[object, object]]:
        def before(module: nn.Module, args: object, kwargs: object) -> tuple[object, object]:
            args, kwargs = self._cast_inputs(module, args, kwargs)
            # In backward a recomputed unit is part of the call whose gradients are being computed.
            if not self.in_backward:
                self.enter(Place(unit.name, unit.is_block), (args, kwargs))
            return args, kwargs

        return before

    def _after(self, module: nn.Module, args: object, kwargs: object, output: object) -> None:
        if not self.in_backward:
            self.leave(output)

    def _cast_inputs(
        self, module: nn.Module, args: object, kwargs: object
    ) -> tuple[object, object]:
        cast = self._cast
        if cast is None:
            return args, kwargs
        return map_tensors(lambda t: t.to(cast) if t.dtype == torch.float32 else t, (args, kwargs))

    def as_float32(self, output: object) -> object:
        """A model's output as the loss gets it: in float32 again if inputs were cast."""
        cast = self._cast
        if cast is None:
            return output
        return map_tensors(lambda t: t.float() if t.dtype == cast else t, output)

    def enter(self, place: Place, inputs: object) -> None:
        """Begin a call with these inputs."""
        self._mark(inputs)
        is_outermost = not self._outer
        if is_outermost:
            self.timeline.close((self.place, False))
        place.is_block = place.is_block or self.place.is_block
        self._outer.append(self.place)
        self._move_to(place)
        place.input_bytes = self._take(inputs, recomputes=place.is_block and is_outermost)

    def _take(self, inputs: object, *, recomputes: bool) -> int:
        """Bytes of a call's inputs; a block that is computed again keeps them, the first that does.

        Parameters and the integers of the batch are not counted.
        """
        total, counted = 0, set()
        for tensor in tensors_in(inputs):
            key = id(storage_of(tensor))
            if key in counted or key in self._owned:
                continue
            counted.add(key)
            made = self._storage(key)
            if made is None:
                total += tensor.nbytes * tensor.dtype.is_floating_point
                continue
            if recomputes:
                made.kept_by = made.kept_by or self.place
                if made.is_taken:
                    continue
                made.is_taken = True
            total += made.size_bytes
        return total

    def leave(self, output: object) -> None:
        """End the call; what follows belongs to the caller, or to a new stretch of glue."""
        self._mark(output)
        self.place.output_bytes += sum({id(t): t.nbytes for t in tensors_in(output)}.values())
        self.timeline.close((self.place, False))
        caller = self._outer.pop()
        if self._outer:
            self.place = caller
        else:
            self._move_to(Place(GLUE))

    def _move_to(self, place: Place) -> None:
        self.place = place
        self.places.append(place)
        self.timeline.open((place, False))

    # Backward

    def begin_backward(self, roots: Sequence[Tensor]) -> None:
        """The forward is over; autograd goes back from `roots`, beginning where they were made."""
        self._mark(roots)
        self.timeline.close((self.place, False))
        node = roots[0].grad_fn if roots else None
        self.place = node.metadata[_PLACE] if node is not None else self.place
        self.in_backward = True
        self.timeline.open((self.place, True))

    def end_backward(self) -> None:
        self.timeline.close((self.place, True))

    def _mark(self, tree: object) -> None:
        """Every autograd node behind these tensors that is not marked was made here."""
        found: list[Node | None] = [t.grad_fn for t in tensors_in(tree)]
        while found:
            node = found.pop()
            if node is None or _PLACE in node.metadata:
                continue
            node.metadata[_PLACE] = self.place
            if node.name() == "torch::autograd::AccumulateGrad":
                self._meet(node.variable)  # type: ignore[attr-defined]
                continue
            node.register_prehook(functools.partial(self._arrive, self.place))
            found.extend(parent for parent, _ in node.next_functions)

    def _meet(self, leaf: Tensor) -> None:
        """Remember the gradient of a leaf that is no stand-in: it will be put back."""
        storage = storage_of(leaf)
        if id(storage) not in self._known:
            self.strangers[id(leaf)] = (leaf, leaf.grad)

    def _arrive(self, place: Place, gradients: object) -> None:
        if place is not self.place:
            self.timeline.close((self.place, True))
            self.place = place
            self.timeline.open((place, True))

    # Operations

    def __torch_dispatch__(
        self,
        func: Operator,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func is self._device_query:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "_grouped_mm":
            result: object = grouped_matmul(*args, **kwargs)  # type: ignore[arg-type]
        elif name == "rand" and args[0] == []:
            # One random number decides whether a layer is dropped. A constant, so that code may
            # look at it, in the middle, so that layers are kept.
            return torch.tensor(0.5)
        else:
            result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    def _note(
        self,
        operator: Operator,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        result: object,
    ) -> None:
        inputs, outputs = _flat((args, tuple(kwargs.values()))), _flat((result,))
        makes_storage = False
        for tensor in outputs:
            storage = storage_of(tensor)
            if storage is None:
                makes_storage = True
            elif id(storage) not in self._known and id(storage) not in self._live:
                if operator.is_view:  # of a real tensor that was there before
                    self._known[id(storage)] = storage
                elif self._is_parameter_cast(operator, inputs):
                    self._known[id(storage)] = storage
                    self._owned[id(storage)] = self._owned[id(storage_of(inputs[0]))]
                    makes_storage = True
                else:
                    self._make(storage)
                    makes_storage = True
        if not launches(operator, makes_storage=makes_storage):
            return
        work = self.place.backward if self.in_backward else self.place.forward
        work.kernels += 1
        work.moved_bytes += moved_bytes(operator, inputs, outputs)
        formula = self._formulas.get(operator.overloadpacket)
        if formula is not None:
            work.flop += formula(*args, **kwargs, out_val=result)
        if not self.in_backward:
            self._note_sharing(inputs)
            if self.place.is_block and operator in self._kept_operators:
                for tensor in outputs:
                    self._keep(tensor)

    def _is_parameter_cast(self, operator: Operator, inputs: Sequence[Tensor]) -> bool:
        return (
            self._casts_are_parameters
            and operator.overloadpacket.__name__ == "_to_copy"
            and id(storage_of(inputs[0])) in self._owned
        )

    def _note_sharing(self, inputs: Iterable[Tensor]) -> None:
        """A parameter used outside its own unit makes that unit a shared one."""
        for tensor in inputs:
            names = self._owned.get(id(storage_of(tensor)))
            if names is not None and self.place.name not in names:
                self.shared |= names

    # Memory

    def _make(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        made = _Storage(self.timeline.make(size), size)

        def release(_: object) -> None:
            del self._live[key]
            made.is_alive = False
            self.timeline.release(made.number)

        self._live[key] = made, weakref.ref(storage, release)
        self._storages.append(made)

    def _storage(self, key: int) -> _Storage | None:
        found = self._live.get(key)
        return found[0] if found else None

    def _keep(self, tensor: Tensor) -> None:
        made = self._storage(id(storage_of(tensor)))
        if made is not None:
            made.kept_by = made.kept_by or self.place

    def saving(self) -> saved_tensors_hooks:
        """A context in which what autograd saves is noted."""

        def pack(tensor: Tensor) -> Tensor:
            made = self._storage(id(storage_of(tensor)))
            if made is not None and not self.in_backward:
                made.saved_by = made.saved_by or self.place
                if not self.place.is_block:
                    made.kept_by = made.kept_by or self.place
            return tensor

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    def saved_bytes(self) -> dict[Place, int]:
        """Bytes alive now that autograd saved, by the first place that saved them."""
        found: dict[Place, int] = {}
        for made in self._storages:
            if made.saved_by is not None and made.is_alive:
                found[made.saved_by] = found.get(made.saved_by, 0) + made.size_bytes
        return found

    def selective_bytes(self) -> dict[Place, int]:
        """The same if blocks kept only their inputs and the outputs of `kept_operators`."""
        found: dict[Place, int] = {}
        for made in self._storages:
            place = made.kept_by
            # A block's own are kept by recompute even where the plain run has let them go.
            if place is not None and (place.is_block or made.is_alive):
                found[place] = found.get(place, 0) + made.size_bytes
        return found

    def number_of(self, tensor: Tensor) -> int | None:
        """The timeline's number for a tensor's memory; None if it was there before."""
        made = self._storage(id(storage_of(tensor)))
        return made.number if made else None


def _flat(values: Iterable[object]) -> list[Tensor]:
    """Tensors in nested tuples and lists; several times faster than a general tree walk."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found.extend(_flat(value))
    return found
