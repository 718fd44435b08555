"""Lists, dicts and data classes that a sharded unit is given, and that its forward changes.

FSDP2 hands a unit copies of those that hold tensors with a gradient, or tensors to cast: a skip, a
loss or a feature that it put on a list for others would be on the copy.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn

_Given = tuple[tuple[Any, ...], dict[str, Any]]


class GivenContainers:
    """Containers that the calls of one unit were given: they become what its forwards make of the
    copies."""

    def __init__(self, module: nn.Module) -> None:
        self._calls: list[tuple[_Given, list[_Copy]]] = []  # a unit may call itself
        module.register_forward_pre_hook(self._note_copies, prepend=True, with_kwargs=True)

    def begin(self, module: nn.Module) -> None:
        """Hook `module`, once FSDP2 has its hooks on it."""
        module.register_forward_pre_hook(self._note_given, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._give_back, with_kwargs=True, always_call=True)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note_given(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls.append(((args, kwargs), []))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note_copies(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given, copies = self._calls[-1]
        copies += _copies(given, (args, kwargs))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _give_back(self, *_: object) -> None:
        _, copies = self._calls.pop()
        for copy in copies:
            copy.give_back()


class _Copy(NamedTuple):
    """A container, its copy, and the items of both before the forward."""

    own: Any
    copy: Any
    own_items: dict[Any, Any]
    items: dict[Any, Any]

    def give_back(self) -> None:
        """Give the items of the copy to the container, if they are others."""
        now = _items(self.copy) or {}
        if list(now) == list(self.items) and all(map(is_, now.values(), self.items.values())):
            return
        before = {id(item): self.own_items[place] for place, item in self.items.items()}
        items = {place: before.get(id(item), item) for place, item in now.items()}
        if isinstance(self.own, list | deque):
            self.own.clear()
            self.own.extend(items.values())
        elif isinstance(self.own, dict):
            self.own.clear()
            self.own.update(items)
        elif not isinstance(self.own, tuple):
            vars(self.own).update(items)


def _copies(own: Any, copy: Any) -> Iterator[_Copy]:
    """Containers that are copied, and those in them."""
    if own is copy or type(own) is not type(copy):
        return
    items, others = _items(own), _items(copy)
    if items is None or others is None or items.keys() != others.keys():
        return
    yield _Copy(own, copy, items, others)
    for place, item in items.items():
        yield from _copies(item, others[place])


def _items(container: Any) -> dict[Any, Any] | None:
    """By their places; None of what is no container."""
    if isinstance(container, dict):
        return dict(container)
    if isinstance(container, list | tuple | deque):
        return dict(enumerate(container))
    if dataclasses.is_dataclass(container) and hasattr(container, "__dict__"):
        return dict(vars(container))
    return None
