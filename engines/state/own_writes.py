"""Writes of a user's own code to parameters of which this rank has a part.

What changes elements one by one, as a clamp or a decay, is right on parts too. A norm, a mean or a
quantile of a part is not that of the whole, and what is made of it would be wrong without a word.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import nn
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
        self.note()

    @property
    def watches(self) -> bool:
        """True if a write would be warned of."""
        return bool(self._parts)

    def note(self) -> None:
        """Take the parameters for what an optimizer or a load made them."""
        self._writes = [_writes(parameter) for _, parameter in self._parts]

    def warn(self) -> None:
        """Warn of the first parameter that was written to since `note`."""
        pairs = zip(self._parts, self._writes, strict=True)
        name = next((name for (name, own), before in pairs if _writes(own) != before), None)
        if name is None:
            return
        whole, axis = tuple(self._layout.shape(name) or ()), self._layout.cut_along(name)
        warnings.warn(
            f"`{name}`, {whole}, was changed outside of an optimizer, and a rank has a part of it:"
            f" it is split over the {axis} axis. A norm, mean or quantile that was taken of it is"
            " that of the part; `parallel.state_dict()` has whole tensors. Changes element by"
            " element are right",
            stacklevel=5,
        )
        self._parts, self._writes = [], []


def _writes(parameter: nn.Parameter) -> tuple[int, ...]:
    """Writes to a parameter, and to the tensor of a shard: lists of an optimizer step those."""
    if isinstance(parameter, DTensor):
        return version_of(parameter), version_of(parameter._local_tensor)
    return (version_of(parameter),)
