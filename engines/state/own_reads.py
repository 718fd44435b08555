"""Losses of a user's own loop that read parameters of which this rank has a part."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from engines.state.layout import Layout
from profiles.capture.frames import model_line
from profiles.torch_compat import tensors_in
from profiles.torch_compat.shards import without_torch_functions


class OwnReads:
    """Watches parameters from a forward to its backward, and warns once.

    A penalty that a loop adds to the loss is then of the part: gradients of a sum over elements are
    right, those of a norm or a mean are not. `train_step` leaves layers whole that its loss reads.

    Args:
        named: parameters of this rank.
        warns: on this rank.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], layout: Layout, *, warns: bool
    ) -> None:
        parts = [(name, own) for name, own in named if layout.cut_along(name)] if warns else []
        # Shards of FSDP2 refuse such reads themselves.
        self._names = {id(own): name for name, own in parts if type(own) is nn.Parameter}
        self._parts = [own for _, own in parts if id(own) in self._names]
        self._layout = layout
        self._is_on = False

    def begin(self) -> None:
        """Watch: a forward is over, and its loss is computed."""
        self._set(is_on=bool(self._parts))

    def end(self) -> None:
        """Do not watch what the model, a backward or an optimizer reads."""
        self._set(is_on=False)

    def _set(self, *, is_on: bool) -> None:
        if is_on != self._is_on:
            self._is_on = is_on
            (_watching.add if is_on else _watching.discard)(self)
            for own in self._parts:
                own.__class__ = _Watched if is_on else nn.Parameter

    def note(self, arguments: object) -> None:
        """Warn if a parameter of this model is among the arguments of an operation."""
        name = next((n for t in tensors_in(arguments) if (n := self._names.get(id(t)))), None)
        if name is None:
            return
        self.end()
        self._parts = []
        shape, axis = tuple(self._layout.shape(name) or ()), self._layout.cut_along(name)
        warnings.warn(
            f"the loss reads `{name}`, {shape}, of which a rank has a part ({model_line()}): it is"
            f" split over the {axis} axis. A norm or a mean of it is that of the part, and so is"
            " its gradient. Give the whole loss as `loss_fn`, and call `train_step`: layers that"
            " it reads stay whole",
            stacklevel=3,
        )


_watching: weakref.WeakSet[OwnReads] = weakref.WeakSet()


class _Watched(nn.Parameter):
    """The class of parameters while they are watched."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with without_torch_functions():
            result = func(*args, **(kwargs or {}))
        if any(made.grad_fn is not None for made in tensors_in(result)):
            for reads in list(_watching):
                reads.note((args, kwargs))
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]
