"""Activation checkpointing of a user's code, left out where its second run would be another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import checkpoint as of_torch


class _OneBackward:
    """A reentrant checkpoint, as one that is not."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            return of_torch.checkpoint(
                function, *args, use_reentrant=False, preserve_rng_state=preserve
            )
        with torch.no_grad():  # it has no gradient, whatever it uses
            return function(*args)


@contextmanager
def within_one_backward() -> Iterator[None]:
    """Inside, a reentrant `torch.utils.checkpoint.checkpoint` runs as one that is not.

    It begins a backward of its own within the backward: a parameter that is used in there and
    elsewhere has its gradient twice, which DDP refuses, and a module's output has none in there,
    which a pipeline would not send.
    """
    # Around every forward: `mock.patch` takes 30 times as long.
    before = of_torch.CheckpointFunction
    of_torch.CheckpointFunction = _OneBackward  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        of_torch.CheckpointFunction = before  # type: ignore[misc]


@contextmanager
def checkpoints_only(where: Callable[[], bool]) -> Iterator[None]:
    """Inside, `torch.utils.checkpoint.checkpoint` just calls its function unless `where()`, and a
    reentrant one runs `within_one_backward`."""
    name = "_checkpoint_without_reentrant_generator"
    # From torch 2.14 on that one is for callers outside, and `checkpoint` calls another.
    name = f"{name}_impl" if hasattr(of_torch, f"{name}_impl") else name
    generator = getattr(of_torch, name)

    def without_reentrant(*args: Any, **kwargs: Any) -> Iterator[None]:
        return generator(*args, **kwargs) if where() else _plain()

    with (
        mock.patch.object(of_torch, name, without_reentrant),
        within_one_backward(),
    ):
        yield


def _plain() -> Iterator[None]:
    """A call is made between two steps."""
    yield
