"""Activation checkpointing of a user's code, left out where its second run would be another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch.utils import checkpoint as of_torch


@contextmanager
def checkpoints_only(where: Callable[[], bool]) -> Iterator[None]:
    """Inside, `torch.utils.checkpoint.checkpoint` just calls its function unless `where()`."""
    generator = of_torch._checkpoint_without_reentrant_generator
    reentrant = of_torch.CheckpointFunction

    def without_reentrant(*args: Any, **kwargs: Any) -> Iterator[None]:
        return generator(*args, **kwargs) if where() else _plain()

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            if where():
                return reentrant.apply(function, preserve, *args)
            return function(*args)

    with (
        mock.patch.object(of_torch, generator.__name__, without_reentrant),
        mock.patch.object(of_torch, reentrant.__name__, Reentrant),
    ):
        yield


def _plain() -> Iterator[None]:
    """A call is made between two steps."""
    yield
