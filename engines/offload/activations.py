"""Activations outside the device: what a block keeps for its backward is moved as it is kept.

torch's own `torch.autograd.graph.save_on_cpu` moves every tensor that an operation keeps, weights
too, and one that several operations keep as often. Here parameters and buffers stay, and memory
that several tensors share is moved once: what is moved is what a profile counts as the block's
activations. Copies wait for each other in the device's own stream, so nothing hides them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from engines.blocks.wrap import wrap_forward
from engines.offload.pool import OffloadPool
from profiles.model import ModelProfile
from profiles.torch_compat import storage_of, version_of


def offload_activations(model: nn.Module, room: OffloadPool, *, profile: ModelProfile) -> None:
    """Replace the forward of every block by one that keeps its activations in `room`, in place.

    Parameter names, hooks and the block's class stay as they are. What is read in the backward is
    what was kept in the forward, also where it was changed in place since.
    """
    for unit in profile.blocks():
        block = model.get_submodule(unit.name)
        wrap_forward(block, _offloaded(room))


def _offloaded(room: OffloadPool) -> Callable[..., object]:
    def run(forward: Callable[..., object], block: nn.Module, *args: Any, **kwargs: Any) -> object:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        mover = _Mover(block, room)
        with saved_tensors_hooks(mover.pack, _unpacked):
            output = forward(*args, **kwargs)
        mover.forget()
        return output

    return run


class _Away:
    """One storage's content in a room, until no operation wants it any more."""

    def __init__(self, storage: torch.UntypedStorage, room: OffloadPool) -> None:
        self._device = storage.device
        self._is_pinned = room.is_pinned
        self._place = room.take(storage.nbytes())
        self._place.storage.copy_(storage, non_blocking=self._is_pinned)
        self._back: weakref.ref[torch.UntypedStorage] | None = None

    def back(self) -> torch.UntypedStorage:
        """On the device again; once for all who have it at the same time."""
        restored = self._back() if self._back is not None else None
        if restored is None:
            restored = torch.UntypedStorage(self._place.storage.nbytes(), device=self._device)
            restored.copy_(self._place.storage, non_blocking=self._is_pinned)
            self._back = weakref.ref(restored)
        return restored


@dataclass(frozen=True, slots=True)
class _Packed:
    """A tensor as a window on memory that is away."""

    away: _Away
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Mover:
    """Moves what one call of a block keeps."""

    def __init__(self, block: nn.Module, room: OffloadPool) -> None:
        held = map(storage_of, chain(block.parameters(), block.buffers()))
        self._stays = {id(storage): storage for storage in held if storage is not None}
        self._room = room
        self._moved: dict[
            tuple[int, int], tuple[weakref.ref[torch.UntypedStorage], weakref.ref[_Away]]
        ] = {}

    def pack(self, tensor: Tensor) -> Tensor | _Packed:
        storage = storage_of(tensor) if type(tensor) in (Tensor, nn.Parameter) else None
        is_plain = storage is not None and not (tensor.is_conj() or tensor.is_neg())
        if storage is None or not is_plain or id(storage) in self._stays or not storage.nbytes():
            return tensor
        return _Packed(
            self._away(storage, version_of(tensor)),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()),
        )

    def _away(self, storage: torch.UntypedStorage, version: int) -> _Away:
        """Moved once for all tensors that share it, while nobody has written to it."""
        key = (id(storage), version)
        origin, moved = self._moved.get(key, (None, None))
        away = moved() if moved is not None else None
        # An id is free again, for another storage, when the first one is gone.
        if origin is None or origin() is not storage or away is None:
            away = _Away(storage, self._room)
            self._moved[key] = (weakref.ref(storage), weakref.ref(away))
        return away

    def forget(self) -> None:
        """The call is over: nothing more of it is packed."""
        self._stays.clear()
        self._moved.clear()


def _unpacked(packed: Tensor | _Packed) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    storage = packed.away.back()
    tensor = torch.empty(0, dtype=packed.dtype, device=storage.device)
    return tensor.set_(storage, packed.offset, packed.shape, packed.stride)
