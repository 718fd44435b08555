"""Writes of a user's own code to parameters, or to their gradients, of which this rank has a part.

What changes elements one by one, as a clamp or a decay, is right on parts too. A norm, a mean or a
quantile of a part is not that of the whole, and what is made of it would be wrong without a word.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engines.state.layout import Layout
from profiles.torch_compat import version_of


class OwnWrites:
    """Compares counts of in-place writes between two steps of an optimizer, and warns once.

    Not those to shards of FSDP2 alone, whose norms are those of the whole; nor what goes through
    `.data`, which torch does not count.

    Args:
        named: parameters of this rank.
        warns: on this rank.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], layout: Layout, *, warns: bool
    ) -> None:
        self._parts = [(n, p) for n, p in named if layout.cut_along(n)] if warns else []
        self._layout = layout
        self._gradients: list[tuple[str, nn.Parameter, Tensor, tuple[int, ...]]] = []
        self.note()

    @property
    def watches(self) -> bool:
        """True if a write would be warned of."""
        return bool(self._parts)

    def note(self) -> None:
        """Take the parameters for what an optimizer or a load made them."""
        self._writes = [_writes(parameter) for _, parameter in self._parts]

    def note_gradients_after_backward(self) -> None:
        """In a backward: take its gradients for what it made them, once all exchanges in it are
        over. Those of replicas end in a callback that is queued after this one, and before the one
        that this one queues."""
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(self._note_gradients))

    def _note_gradients(self) -> None:
        self._gradients = [
            (name, own, own.grad, _writes(own.grad))
            for name, own in self._parts
            if own.grad is not None
        ]

    def warn(self) -> None:
        """Warn of the first parameter that was written to since `note`."""
        pairs = zip(self._parts, self._writes, strict=True)
        name = next((name for (name, own), before in pairs if _writes(own) != before), None)
        if name is not None:
            self._warn(name, "was changed outside of an optimizer", "`parallel.state_dict()`")

    def warn_of_gradients(self) -> None:
        """Warn of the first gradient that was written to, or replaced, since its backward."""
        for name, own, gradient, writes in self._gradients:
            if own.grad is not None and (own.grad is not gradient or _writes(gradient) != writes):
                self._warn(name, "has a gradient that was changed", "`parallel.full_gradients()`")
                break
        self._gradients = []

    def _warn(self, name: str, what: str, whole: str) -> None:
        shape, axis = tuple(self._layout.shape(name) or ()), self._layout.cut_along(name)
        warnings.warn(
            f"`{name}`, {shape}, {what}, and a rank has a part of it: it is split over the {axis}"
            f" axis. A norm, mean or quantile that was taken of it is that of the part; {whole} has"
            " whole tensors. Changes element by element are right",
            stacklevel=6,
        )
        self._parts, self._writes, self._gradients = [], [], []


def _writes(tensor: Tensor) -> tuple[int, ...]:
    """Writes to a tensor, and to that of a shard: lists of an optimizer step those."""
    if isinstance(tensor, DTensor):
        return version_of(tensor), version_of(tensor._local_tensor)
    return (version_of(tensor),)
