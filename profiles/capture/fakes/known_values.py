"""Values of fake tensors, as far as they follow from the batch, from buffers and from constants.

They let code on fake tensors read what it would read in a real run: lengths, masks, counts, which
tokens are images. Memory is what is known, not tensors: a view of known memory is known, and a
write to it changes what all views read. An operation whose inputs are all known is computed; its
outputs are then known too. What parameters take part in stays unknown, and so do large tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from profiles.capture.batch.call import Batch
from profiles.capture.batch.tree import batch_tensors
from profiles.capture.fakes.tensors import Fakes, elements_once
from profiles.torch_compat import (
    Operator,
    is_fake,
    is_mutable,
    map_tensors,
    storage_of,
    tensors_in,
    tensors_written,
    without_modes,
)

MOST_BYTES = 2**26
"""Of one tensor that is computed: a mask of 8192 x 8192 is that large."""
_MOST_BLANK_BYTES = 2**30  # of an unknown input whose values do not matter, only its shape
_DRAWS = torch.Tag.nondeterministic_seeded
_INDEX = torch.ops.aten.index.Tensor


class KnownValues:
    """Real memory for some fake tensors. Nothing here is seen by modes or by autograd."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[weakref.ref[Any], torch.UntypedStorage]] = {}
        self._constant: set[int] = set()  # of those, what does not depend on the batch

    def put(self, fake: Tensor, value: Tensor) -> None:
        """The elements of a fake tensor are those of `value`, its rows once or several times."""
        with without_modes(), torch.no_grad():
            times = len(fake) // len(value) if value.ndim and len(value) else 1
            rows = torch.cat([value] * times) if times > 1 else value
            self._put(fake, rows, is_constant=False)

    def of(self, tensor: Tensor) -> Tensor | None:
        """The values of a tensor, in memory that its writes go to; None if they are not known."""
        if not is_fake(tensor):
            return tensor if tensor.device.type == "cpu" else None
        storage = self._storage(tensor)
        if storage is None:
            return None
        with without_modes(), torch.no_grad():
            empty = torch.empty(0, dtype=tensor.dtype)
            return empty.set_(storage, _offset(tensor), tensor.size(), tensor.stride())

    def are_constant(self, tensors: Iterable[Tensor]) -> bool:
        """True if the values are known and are the same for every batch."""
        return all(id(storage_of(t)) in self._constant or not is_fake(t) for t in tensors)

    def run(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """The result of an operation on fake tensors; where shapes do not tell it, from values."""
        try:
            result = operator(*args, **kwargs)
        except Exception as error:
            return self._from_values(operator, args, kwargs, error)
        self._follow(operator, args, kwargs, result)
        return result

    def _from_values(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
    ) -> object:
        """Compute what fake tensors cannot say.

        Unknown floating inputs may be any: lengths and masks decide shapes, what they are applied
        to does not.
        """
        inputs = tensors_in((args, kwargs))
        if operator is _INDEX and (numbers := self._numbers(args[1])) is not None:
            return self.run(operator, (args[0], numbers), kwargs)
        values = {id(tensor): self.of(tensor) for tensor in inputs}
        are_known = all(value is not None for value in values.values())
        missing = [tensor for tensor in inputs if values[id(tensor)] is None]
        may_be_any = all(
            t.is_floating_point() and t.nbytes <= _MOST_BLANK_BYTES for t in missing
        ) and any(not t.is_floating_point() for t in inputs)
        if not are_known and not may_be_any:
            raise error
        is_constant = self.are_constant(inputs) and _DRAWS not in operator.tags

        def value(tensor: Tensor) -> Tensor:
            known = values[id(tensor)]
            if known is not None:
                return known
            return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)

        with without_modes(), torch.no_grad():
            result = operator(*map_tensors(value, args), **map_tensors(value, kwargs))

        def fake(real: Tensor) -> Tensor:
            made = torch.empty_strided(real.size(), real.stride(), dtype=real.dtype)
            if are_known or not real.is_floating_point():
                with without_modes():
                    self._put(made, real, is_constant=is_constant)
            return made

        return map_tensors(fake, result)

    def _numbers(self, indices: Sequence[Tensor | None]) -> list[Tensor | None] | None:
        """Indices with the masks among them as numbers of elements; None without a known mask."""
        numbers: list[Tensor | None] = []
        masks = [t for t in indices if t is not None and t.dtype in (torch.bool, torch.uint8)]
        if not masks or any(self.of(mask) is None for mask in masks):
            return None
        for index in indices:
            if not any(index is mask for mask in masks):
                numbers.append(index)
                continue
            assert index is not None
            value = self.of(index)
            assert value is not None
            with without_modes(), torch.no_grad():
                places = [place.clone() for place in value.nonzero().unbind(1)]
            for place in places:
                made = torch.empty(place.size(), dtype=place.dtype)
                with without_modes():
                    self._put(made, place, is_constant=False)
                numbers.append(made)
        return numbers

    def _follow(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: object
    ) -> None:
        """Compute the values of the outputs of an operation, and what it writes to."""
        written = tensors_written(operator, args, kwargs) if is_mutable(operator) else []
        outputs = tensors_in(result)
        unknown = [t for t in outputs if is_fake(t) and self._storage(t) is None]
        if not unknown and not written:
            return
        inputs = tensors_in((args, kwargs))
        values = {id(tensor): self.of(tensor) for tensor in inputs}
        if any(v is None for v in values.values()) or any(t.nbytes > MOST_BYTES for t in unknown):
            for tensor in written:
                self._forget(tensor)
            return
        is_constant = self.are_constant(inputs) and _DRAWS not in operator.tags
        with without_modes(), torch.no_grad():
            real = operator(
                *map_tensors(lambda t: _not_none(values[id(t)]), args),
                **map_tensors(lambda t: _not_none(values[id(t)]), kwargs),
            )
            for tensor, value in zip(outputs, tensors_in(real), strict=True):
                if is_fake(tensor) and self._storage(tensor) is None:
                    self._put(tensor, value, is_constant=is_constant)
        if not is_constant:
            self._constant -= {id(storage_of(tensor)) for tensor in written}

    def _storage(self, tensor: Tensor) -> torch.UntypedStorage | None:
        entry = self._storages.get(id(storage_of(tensor)))
        return entry[1] if entry is not None else None

    def _put(self, fake: Tensor, value: Tensor, *, is_constant: bool) -> None:
        memory = storage_of(fake)
        if memory is None or value.layout is not torch.strided:
            return
        key, storage = id(memory), torch.UntypedStorage(memory.nbytes())
        whole = torch.empty(0, dtype=fake.dtype)
        whole = whole.set_(storage, _offset(fake), fake.size(), fake.stride())
        once = elements_once(whole)
        whole[once].copy_(value.detach()[once])

        def release(_: object) -> None:
            self._storages.pop(key, None)
            self._constant.discard(key)

        self._storages[key] = weakref.ref(memory, release), storage
        if is_constant:
            self._constant.add(key)

    def _forget(self, tensor: Tensor) -> None:
        self._storages.pop(id(storage_of(tensor)), None)
        self._constant.discard(id(storage_of(tensor)))


def known_values(fakes: Fakes, sample: Batch, batch: Batch) -> KnownValues:
    """Collect what is known before a run: the batch, buffers, and parameters of one element.

    Args:
        fakes: stand-ins of the model and of `sample`.
        batch: the stand-ins that the model is given: the rows of the sample, once or several times.
    """
    values = KnownValues()
    for real, fake in fakes.pairs():
        is_small = not isinstance(real, nn.Parameter) or real.numel() == 1
        if is_small and real.nbytes <= MOST_BYTES and not real.is_meta:
            values.put(fake, real)
    for real, fake in zip(batch_tensors(sample), batch_tensors(batch), strict=True):
        if fake.nbytes <= MOST_BYTES and not real.is_meta:
            values.put(fake, real)
    return values


class ArrayReads(TorchFunctionMode):
    """Calls `note` with the name where code takes the elements of a tensor out of torch.

    Fake tensors whose `values` are known give these.
    """

    def __init__(self, values: KnownValues | None, note: Callable[[str], None]) -> None:
        super().__init__()
        self._values, self._note = values, note

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        if func in (Tensor.numpy, Tensor.tolist, Tensor.__array__):
            self._note(func.__name__.strip("_"))
            value = self._values.of(args[0]) if self._values is not None else None
            if value is not None:
                with without_modes():
                    return func(value, *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _offset(tensor: Tensor) -> int:
    return int(tensor.storage_offset())


def _not_none(value: Tensor | None) -> Tensor:
    assert value is not None
    return value
