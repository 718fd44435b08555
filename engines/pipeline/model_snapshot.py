"""Snapshot of the model before a plan, with parameters on the meta device, for recordings.

Applying a plan changes classes, hooks, forwards and parameters in place, and batches of new shapes
are recorded long after.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from profiles.capture.fakes.tensors import copied


class ModelSnapshot:
    """Classes and attributes of all modules of `model`, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        meta = _MetaParameters()
        copies: dict[int, object] = {}
        self._modules = [
            (
                module,
                type(module),
                {name: copied(value, meta.of, copies) for name, value in vars(module).items()},
            )
            for module in model.modules()
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Restore the snapshot inside, in the present train or eval mode, with parameters on the
        meta device."""
        live = [(module, type(module), vars(module)) for module, _, _ in self._modules]
        try:
            for module, kind, attributes in self._modules:
                _set_state(module, kind, {**attributes, "training": module.training})
            yield
        finally:
            for module, kind, attributes in live:
                _set_state(module, kind, attributes)


class _MetaParameters:
    """Meta-device parameters of the same shape, strides and dtype. Ties stay ties."""

    def __init__(self) -> None:
        self._made: dict[int, Tensor] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """The meta parameter of a parameter; any other tensor itself."""
        if not isinstance(tensor, nn.Parameter):
            return tensor
        if id(tensor) not in self._made:
            meta = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
            )
            self._made[id(tensor)] = nn.Parameter(meta, requires_grad=tensor.requires_grad)
        return self._made[id(tensor)]


def _set_state(module: nn.Module, kind: type[nn.Module], attributes: dict[str, object]) -> None:
    object.__setattr__(module, "__class__", kind)
    object.__setattr__(module, "__dict__", attributes)
