"""Activation offloading: tensors that a block saves for its backward are moved as they are saved.

torch's own `torch.autograd.graph.save_on_cpu` moves every tensor that an operation saves, weights
too, and once for each operation. Here parameters and buffers stay, and memory that several tensors
share is moved once: that is the block's activations as a profile counts them. Copies are ordered in
the device's own stream, so nothing hides them.
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
from profiles.model.profile import ModelProfile
from profiles.torch_compat import storage_of, version_of


def offload_activations(model: nn.Module, pool: OffloadPool, *, profile: ModelProfile) -> None:
    """Replace the forward of every block by one that saves its activations in `pool`, in place.

    Parameter names, hooks and the block's class stay as they are. The backward reads the saved
    values, also of tensors that were changed in place since.
    """
    for unit in profile.blocks():
        block = model.get_submodule(unit.name)
        wrap_forward(block, _offloaded(pool))


def _offloaded(pool: OffloadPool) -> Callable[..., object]:
    def run(forward: Callable[..., object], block: nn.Module, *args: Any, **kwargs: Any) -> object:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        mover = _Mover(block, pool)
        with saved_tensors_hooks(mover.pack, _unpacked):
            output = forward(*args, **kwargs)
        mover.forget()
        return output

    return run


class _OffloadedStorage:
    """The content of a storage in a pool, until no operation needs it any more."""

    def __init__(self, storage: torch.UntypedStorage, pool: OffloadPool) -> None:
        self._device = storage.device
        self._is_pinned = pool.is_pinned
        self._place = pool.allocate(storage.nbytes())
        self._place.storage.copy_(storage, non_blocking=self._is_pinned)
        self._restored: weakref.ref[torch.UntypedStorage] | None = None

    def restore(self) -> torch.UntypedStorage:
        """A copy on the device, shared by all who use it at the same time."""
        restored = self._restored() if self._restored is not None else None
        if restored is None:
            restored = torch.UntypedStorage(self._place.storage.nbytes(), device=self._device)
            restored.copy_(self._place.storage, non_blocking=self._is_pinned)
            self._restored = weakref.ref(restored)
        return restored


@dataclass(frozen=True, slots=True)
class _Packed:
    """A tensor as a view of offloaded memory."""

    offloaded: _OffloadedStorage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Mover:
    """Moves the tensors that one call of a block saves."""

    def __init__(self, block: nn.Module, pool: OffloadPool) -> None:
        own = map(storage_of, chain(block.parameters(), block.buffers()))
        self._stays = {id(storage): storage for storage in own if storage is not None}
        self._pool = pool
        self._moved: dict[
            tuple[int, int],
            tuple[weakref.ref[torch.UntypedStorage], weakref.ref[_OffloadedStorage]],
        ] = {}

    def pack(self, tensor: Tensor) -> Tensor | _Packed:
        storage = storage_of(tensor) if type(tensor) in (Tensor, nn.Parameter) else None
        is_plain = storage is not None and not (tensor.is_conj() or tensor.is_neg())
        if storage is None or not is_plain or id(storage) in self._stays or not storage.nbytes():
            return tensor
        return _Packed(
            self._offload(storage, version_of(tensor)),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()),
        )

    def _offload(self, storage: torch.UntypedStorage, version: int) -> _OffloadedStorage:
        """The offloaded storage, one for all tensors that share it, until it is written to."""
        key = (id(storage), version)
        origin, moved = self._moved.get(key, (None, None))
        offloaded = moved() if moved is not None else None
        # An id is free again, for another storage, when the first one is gone.
        if origin is None or origin() is not storage or offloaded is None:
            offloaded = _OffloadedStorage(storage, self._pool)
            self._moved[key] = (weakref.ref(storage), weakref.ref(offloaded))
        return offloaded

    def forget(self) -> None:
        """End the call: nothing more of it is packed."""
        self._stays.clear()
        self._moved.clear()


def _unpacked(packed: Tensor | _Packed) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    storage = packed.offloaded.restore()
    tensor = torch.empty(0, dtype=packed.dtype, device=storage.device)
    return tensor.set_(storage, packed.offset, packed.shape, packed.stride)
