"""The model as it was given, without the memory of its parameters: what recordings are made of.

Applying a plan changes classes, hooks, forwards and parameters in place, and batches of new shapes
are recorded long after.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from profiles.fakes import copied


class Skeleton:
    """Classes and attributes of all modules of `model`, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        bones = _Bones()
        copies: dict[int, object] = {}
        self._kept = [
            (
                module,
                type(module),
                {name: copied(value, bones.of, copies) for name, value in vars(module).items()},
            )
            for module in model.modules()
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the modules are as they were, in the mode that they are in now; parameters are on
        the meta device."""
        live = [(module, type(module), vars(module)) for module, _, _ in self._kept]
        try:
            for module, kind, attributes in self._kept:
                _become(module, kind, {**attributes, "training": module.training})
            yield
        finally:
            for module, kind, attributes in live:
                _become(module, kind, attributes)


class _Bones:
    """For each parameter one without memory: same shape, strides and dtype. Ties stay ties."""

    def __init__(self) -> None:
        self._made: dict[int, Tensor] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """The same object where it is no parameter: buffers stay what they are."""
        if not isinstance(tensor, nn.Parameter):
            return tensor
        if id(tensor) not in self._made:
            meta = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
            )
            self._made[id(tensor)] = nn.Parameter(meta, requires_grad=tensor.requires_grad)
        return self._made[id(tensor)]


def _become(module: nn.Module, kind: type[nn.Module], attributes: dict[str, object]) -> None:
    object.__setattr__(module, "__class__", kind)
    object.__setattr__(module, "__dict__", attributes)
