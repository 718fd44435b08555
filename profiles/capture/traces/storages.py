"""The memory behind tensors in a traced run: whose it is, how long it lives, who keeps it."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from profiles.torch_compat import Operator, storage_of, tensors_in
from profiles.trace.scopes import LayerSegment, Scope
from profiles.trace.timeline import Timeline


@dataclass(slots=True, eq=False)
class _Made:
    """Memory that the run allocated; `number` is its name in the timeline.

    `savers` keep it for backward as the model is, it is put down to the first; `kept_by` would if
    blocks were recomputed selectively; `is_taken`: it was among the inputs of a block already.
    `part`: of a unit, that made it.
    """

    number: int
    size_bytes: int
    part: LayerSegment | None
    is_alive: bool = True
    savers: list[Scope] = field(default_factory=list)
    kept_by: Scope | None = None
    is_taken: bool = False


class Storages:
    """Follows every storage from the operation that makes it to its release.

    Tensors that share memory have the same storage object, so it is known by its id.

    Args:
        owned: for the storages of parameters, the units that hold them.
        names: of the parameters in these storages.
        known: further storages that were there before: buffers, the batch.
        casts_are_parameters: a cast of a parameter is a parameter, not an activation (autocast).
    """

    def __init__(
        self,
        *,
        owned: Mapping[torch.UntypedStorage, frozenset[str]],
        names: Mapping[torch.UntypedStorage, str],
        known: Iterable[torch.UntypedStorage],
        casts_are_parameters: bool,
    ) -> None:
        self.timeline = Timeline()
        self._owned = {id(storage): holders for storage, holders in owned.items()}
        self._names = {id(storage): name for storage, name in names.items()}
        self._known = {id(storage): storage for storage in (*owned, *known)}
        self._casts_are_parameters = casts_are_parameters
        self._live: dict[int, tuple[_Made, weakref.ref[torch.UntypedStorage]]] = {}
        self._all: list[_Made] = []

    def is_known(self, tensor: Tensor) -> bool:
        """True if the memory existed before the run."""
        return id(storage_of(tensor)) in self._known

    def holders_of(self, tensor: Tensor) -> frozenset[str]:
        """Units that hold this parameter, or a parameter that this is a view or cast of."""
        return self._owned.get(id(storage_of(tensor)), frozenset())

    def parameter_name(self, tensor: Tensor) -> str:
        """First name of the parameter that this is, or is a view or cast of."""
        return self._names[id(storage_of(tensor))]

    def number_of(self, tensor: Tensor) -> int | None:
        """Its name in the timeline; None if it was there before."""
        made = self._made(tensor)
        return made.number if made else None

    def memory_of(self, tensor: Tensor) -> int | None:
        """`number_of`, and for what was there before a number below zero; None where it has no
        memory of its own (sparse)."""
        made = self._made(tensor)
        if made is not None:
            return made.number
        storage = storage_of(tensor)
        return -id(storage) if id(storage) in self._known else None

    def standing(self, tensor: Tensor) -> Hashable:
        """All that decides what a call that takes it is charged for: alike for tensors alike."""
        storage, made = storage_of(tensor), self._made(tensor)
        size_bytes = storage.nbytes() if storage is not None else None
        if made is None:
            return size_bytes, self.holders_of(tensor), id(storage) in self._known
        return size_bytes, bool(made.savers), made.kept_by is not None, made.is_taken

    def is_saved_by(self, tensor: Tensor, scope: Scope) -> bool:
        made = self._made(tensor)
        return made is not None and scope in made.savers

    def is_selectively_saved_by(self, tensor: Tensor, scope: Scope) -> bool:
        """True if the scope would save the tensor under selective recompute."""
        made = self._made(tensor)
        return made is not None and made.kept_by is scope

    def is_alive(self, number: int) -> bool:
        """True if the memory of this number is allocated; memory from before the run always is."""
        return number < 0 or self._all[number].is_alive

    def is_kept(self, number: int) -> bool:
        """True if autograd holds the memory now, or it existed before the run."""
        return number < 0 or (self._all[number].is_alive and bool(self._all[number].savers))

    def is_first_saved_by(self, number: int, scope: Scope) -> bool:
        return self.first_saver(number) is scope

    def first_saver(self, number: int) -> Scope | None:
        """The first scope to save the memory, if autograd holds it now."""
        made = self._all[number] if number >= 0 else None
        return made.savers[0] if made is not None and made.is_alive and made.savers else None

    def notice(
        self,
        operator: Operator,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        part: LayerSegment | None = None,
    ) -> bool:
        """Note what a call made, in this part of a unit; whether it made anything."""
        allocates = False
        for tensor in outputs:
            storage = storage_of(tensor)
            if storage is None:  # sparse: made of tensors that were noticed on their own
                allocates = True
            elif id(storage) not in self._known and id(storage) not in self._live:
                if operator.is_view:  # of a real tensor from outside the model
                    self._known[id(storage)] = storage
                    continue
                allocates = True
                if self._is_parameter_cast(operator, inputs):
                    self._known[id(storage)] = storage
                    self._owned[id(storage)] = self.holders_of(inputs[0])
                    self._names[id(storage)] = self.parameter_name(inputs[0])
                else:
                    self._make(storage, part)
        return allocates

    def hand_on(self, tensor: Tensor, maker: LayerSegment, taker: LayerSegment) -> None:
        """Count memory that `maker` allocated as allocated by `taker`."""
        made = self._made(tensor)
        if made is not None and made.part is maker:
            made.part = taker

    def save(self, tensor: Tensor, scope: Scope) -> None:
        """Autograd keeps this for backward; recompute would too outside blocks."""
        made = self._made(tensor)
        if made is not None:
            if scope not in made.savers:
                made.savers.append(scope)
            if not scope.is_block:
                made.kept_by = made.kept_by or scope

    def keep(self, tensor: Tensor, scope: Scope) -> None:
        """Selective recompute would keep this."""
        made = self._made(tensor)
        if made is not None:
            made.kept_by = made.kept_by or scope

    def take(self, inputs: object, scope: Scope, *, is_recomputed: bool) -> int:
        """Bytes of a call's inputs, without parameters and without the integers of the batch.

        A block that is computed again keeps its inputs: what several blocks take is counted in the
        first.
        """
        total = 0
        by_storage = {id(storage_of(tensor)): tensor for tensor in tensors_in(inputs)}
        for tensor in by_storage.values():
            made = self._made(tensor)
            if made is None:
                is_input = tensor.is_floating_point() and not self.holders_of(tensor)
                total += tensor.nbytes * is_input
            elif not (is_recomputed and made.is_taken):
                total += made.size_bytes
            if made is not None and is_recomputed:
                made.is_taken = True
                made.kept_by = made.kept_by or scope
        return total

    def saved_bytes(self) -> dict[Scope, int]:
        """Bytes that autograd holds now, by the first scope that saved them."""
        return _sum((made.savers[0], made) for made in self._all if made.is_alive and made.savers)

    def selective_bytes(self) -> dict[Scope, int]:
        """Bytes that it would hold if blocks saved only inputs and the outputs of
        `kept_operators`."""
        # What a block keeps for itself it keeps even where the plain run has let it go.
        return _sum(
            (made.kept_by, made)
            for made in self._all
            if made.is_alive or (made.kept_by is not None and made.kept_by.is_block)
        )

    def saved_bytes_of_parts(self) -> dict[LayerSegment, int]:
        """`saved_bytes` of scopes, by the segments of them that made it."""
        return _sum(
            (_part_in(made, made.savers[0]), made)
            for made in self._all
            if made.is_alive and made.savers
        )

    def selective_bytes_of_parts(self) -> dict[LayerSegment, int]:
        """`selective_bytes` of scopes, by the segments of them that made it."""
        return _sum(
            (_part_in(made, made.kept_by), made)
            for made in self._all
            if made.is_alive or (made.kept_by is not None and made.kept_by.is_block)
        )

    def _made(self, tensor: Tensor) -> _Made | None:
        entry = self._live.get(id(storage_of(tensor)))
        return entry[0] if entry else None

    def _make(self, storage: torch.UntypedStorage, part: LayerSegment | None) -> None:
        key, size_bytes = id(storage), storage.nbytes()
        made = _Made(self.timeline.make(size_bytes), size_bytes, part)

        def release(_: object) -> None:
            del self._live[key]
            made.is_alive = False
            self.timeline.release(made.number)

        self._live[key] = made, weakref.ref(storage, release)
        self._all.append(made)

    def _is_parameter_cast(self, operator: Operator, inputs: Sequence[Tensor]) -> bool:
        return (
            self._casts_are_parameters
            and operator.overloadpacket.__name__ == "_to_copy"
            and bool(self.holders_of(inputs[0]))
        )


Keeper = TypeVar("Keeper", bound=Hashable)


def _sum(pairs: Iterable[tuple[Keeper | None, _Made]]) -> dict[Keeper, int]:
    total: dict[Keeper, int] = {}
    for keeper, made in pairs:
        if keeper is not None:
            total[keeper] = total.get(keeper, 0) + made.size_bytes
    return total


def _part_in(made: _Made, keeper: Scope | None) -> LayerSegment | None:
    """The part of `keeper` that made it, if one did."""
    return made.part if made.part is not None and made.part.scope is keeper else None
