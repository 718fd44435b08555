"""Tensors that autograd saves for the backward, in the hands of hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from profiles.torch_compat import saving_hook


class SavedTensors:
    """Notes what autograd saves, and lets go of what no backward has read.

    A node that saves its own output (softmax, relu) and gets it from a hook holds itself: where the
    backward does not come by, or the forward fails, neither it nor what leads to it would be freed.

    Args:
        note: called with each tensor.
    """

    def __init__(self, note: Callable[[Tensor], object]) -> None:
        self._note = note
        self._packed: weakref.WeakSet[_Packed] = weakref.WeakSet()
        self._pack = self._packing  # one object, by which it is known

    @property
    def is_noting(self) -> bool:
        """True inside `hooks`, and inside no hook of the model's own (checkpoints, offloading)."""
        return saving_hook() is self._pack

    def hooks(self) -> AbstractContextManager[object]:
        """A context in which what autograd saves is noted."""
        return saved_tensors_hooks(self._pack, lambda packed: packed.tensor)

    def release(self) -> None:
        """Let go of all that is still saved: no backward can follow."""
        for packed in list(self._packed):
            packed.tensor = None

    def _packing(self, tensor: Tensor) -> _Packed:
        self._note(tensor)
        packed = _Packed(tensor)
        self._packed.add(packed)
        return packed


class _Packed:
    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
