"""Copies between devices in the forward of a manually placed module.

It is looked at on stand-ins that are all on one device, so where a tensor would be is followed: an
operation runs where its parameters are (without any, where its inputs are), and leaves its outputs
there. `to(...)` copies. Where an operation would meet a tensor of another device the code has moved
it by words that a stand-in does not hear, as `x.to(weight.device)`: it is copied there too, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from profiles.capture.traces.storages import Storages
from profiles.model.crossings import DeviceCrossing
from profiles.torch_compat import Operator
from profiles.trace.tally import affine


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes of one tensor on its way; `returns`: a gradient comes back."""

    source: str
    target: str
    nbytes: int
    returns: bool


class CopyTrace:
    """Tracks the device of each memory, and the copies between devices.

    Args:
        placed: devices of parameters, of buffers and of the batch, by their memories
            (`Storages.memory_of`).
    """

    def __init__(self, storages: Storages, placed: Mapping[int, str]) -> None:
        self.copies: list[Copy] = []
        self._storages = storages
        self._places: dict[int, tuple[str, ...]] = {m: (device,) for m, device in placed.items()}

    def operation(
        self,
        operator: Operator,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        asked: torch.device | None,
    ) -> None:
        """An operation of the forward; `asked`: the device that its code names, if it does."""
        if asked is not None and asked.type != "cpu":  # the stand-ins' own device says nothing
            target: str | None = f"{asked.type}:{asked.index or 0}"
            if operator.overloadpacket.__name__ == "_to_copy":
                self._copied(inputs[0], target)
        else:
            target = self._where(inputs)
            for tensor in inputs:
                self._copied(tensor, target)
                self._be_at(tensor, target)
        for tensor in outputs:
            self._be_at(tensor, target)

    def _where(self, inputs: Sequence[Tensor]) -> str | None:
        """The device of the first parameter, else of the first tensor that is on one."""
        parameters = [tensor for tensor in inputs if self._storages.holders_of(tensor)]
        devices = (self._devices(tensor) for tensor in (*parameters, *inputs))
        return next((candidates[0] for candidates in devices if candidates), None)

    def _memory(self, tensor: Tensor) -> int | None:
        """None also for numbers, which pass between devices by themselves."""
        return self._storages.memory_of(tensor) if tensor.dim() else None

    def _devices(self, tensor: Tensor) -> tuple[str, ...]:
        """Devices of the memory: where it was made, then those it was copied to; empty if it has no
        inputs."""
        memory = self._memory(tensor)
        return () if memory is None else self._places.get(memory, ())

    def _be_at(self, tensor: Tensor, device: str | None) -> None:
        memory, devices = self._memory(tensor), self._devices(tensor)
        if memory is not None and device is not None and device not in devices:
            self._places[memory] = (*devices, device)

    def _copied(self, tensor: Tensor, target: str | None) -> None:
        devices = self._devices(tensor)
        if target is not None and devices and target not in devices:
            self.copies.append(Copy(devices[0], target, tensor.nbytes, tensor.requires_grad))


def crossings(
    once: Sequence[Copy], twice: Sequence[Copy] | None, samples: int
) -> tuple[DeviceCrossing, ...]:
    """All copies from one device to another together, from a forward over `samples` and one over
    twice as many if there is one."""
    ways = dict.fromkeys((copy.source, copy.target) for copy in once)
    return tuple(_crossing(way, once, twice, samples) for way in ways)


def _crossing(
    way: tuple[str, str], once: Sequence[Copy], twice: Sequence[Copy] | None, samples: int
) -> DeviceCrossing:
    def total(copies: Sequence[Copy]) -> int:
        return sum(copy.nbytes for copy in copies)

    ones = [copy for copy in once if (copy.source, copy.target) == way]
    twos = [copy for copy in twice or () if (copy.source, copy.target) == way]
    back, twos_back = ([c for c in copies if c.returns] for copies in (ones, twos))
    return DeviceCrossing(
        source=way[0],
        target=way[1],
        bytes=affine(total(ones), total(twos) if twice else None, samples),
        copies=len(ones),
        back_bytes=affine(total(back), total(twos_back) if twice else None, samples),
        back_copies=len(back),
    )
