"""Lets code run on stand-ins as on the real tensors, where fake tensors alone would fail."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from profiles.capture.batch.call import Batch
from profiles.capture.batch.tree import batch_tensors
from profiles.capture.fakes.known_values import KnownValues
from profiles.capture.fakes.transformers_compat import masks_of_a_real_run
from profiles.capture.operators.map_layouts import as_kernels_lay_out
from profiles.capture.operators.table import grouped_matmul
from profiles.torch_compat import (
    Operator,
    TorchDispatchMode,
    device_of,
    device_query,
    is_fake,
    is_mutable,
    reads_values,
    storage_of,
    tensors_in,
    tensors_written,
)

_STAND_IN = torch.device("cpu")
KEPT = 0.5
"""A random number with which layers are kept, as they mostly are."""
EXTREMES = (0.0, 1 - 2**-24)
"""The least and the largest random number: with one of them a layer is dropped if it ever is."""
_ONES = ("ones", "ones_like", "new_ones")


class FakeRunMode(TorchDispatchMode):
    """Answers operations that fake tensors have no answer to, and passes on all others.

    Args:
        values: those that are known, if they may be read.
        draw: the random number that code gets which decides by one whether a layer is dropped.
    """

    def __init__(self, values: KnownValues | None = None, *, draw: float = KEPT) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values = values
        self.has_drawn = False
        self._draw = draw
        self._device_query = device_query()
        self._ones: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # memory that is all ones
        self.asked: torch.device | None = None  # the device that the operation's code names

    @contextmanager
    def on(self, batch: Batch) -> Iterator[None]:
        """Inside, code runs on the stand-ins of `batch`, with the masks of a real run."""
        given = {id(storage_of(tensor)) for tensor in batch_tensors(batch)}
        masks = masks_of_a_real_run(
            is_unpacked=lambda ids: is_fake(ids) and id(storage_of(ids)) not in given,
            is_all_ones=self.is_all_ones,
        )
        with masks, self:
            yield

    def is_all_ones(self, tensor: Tensor) -> bool:
        """True if the run made the tensor of ones, or cast it from such a one; inputs are
        unknown."""
        storage = storage_of(tensor)
        made = self._ones.get(id(storage))
        return made is not None and made() is storage

    def note(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: object
    ) -> None:
        """Called after each operation; subclasses record it."""

    def note_read(self, operation: str) -> None:
        """Called where code reads values of the batch; subclasses record it."""

    def __torch_dispatch__(
        self,
        func: Operator,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        self.asked = kwargs.get("device")
        if self.asked is not None:
            # Code that moves between devices by hand: here all stand in for one.
            kwargs = {**kwargs, "device": _STAND_IN}
        if func is self._device_query:
            return device_of(args[0])
        name = func.overloadpacket.__name__
        if name == "rand" and args[0] == []:
            # One random number decides whether a layer is dropped. A constant, so that code may
            # look at it.
            self.has_drawn = True
            return torch.tensor(self._draw)
        if name == "_grouped_mm" and is_fake(args[0]):
            result: object = grouped_matmul(*args, **kwargs)
        elif self.values is not None:
            result = self.values.run(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        result = as_kernels_lay_out(name, args, result)
        if name in _ONES or (name == "_to_copy" and self.is_all_ones(args[0])):
            storages = filter(None, map(storage_of, tensors_in(result)))
            self._ones |= {id(storage): weakref.ref(storage) for storage in storages}
        elif self._ones and is_mutable(func):
            for tensor in tensors_written(func, args, kwargs):
                self._ones.pop(id(storage_of(tensor)), None)
        if reads_values(func, args) and not self._is_constant(args):
            self.note_read(name.strip("_"))
        self.note(func, args, kwargs, result)
        return result

    def _is_constant(self, args: tuple[Any, ...]) -> bool:
        """True for values that every batch has: fake tensors alone know no others."""
        tensors = tensors_in(args)
        if self.values is not None:
            return self.values.are_constant(tensors)
        return any(map(is_fake, tensors))
