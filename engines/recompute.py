"""Activation recompute: blocks forget what their backward can compute again.

The word checkpoint is kept for saved weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from engines.plan import Recompute
from profiles.model import ModelProfile
from profiles.operators import kept_operators
from profiles.torch_compat import is_batch_norm

Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]


def recompute_blocks(model: nn.Module, kind: Recompute, *, profile: ModelProfile) -> None:
    """Replace the forward of every block by one that keeps less, in place.

    Parameter names, hooks and the block's class stay as they are. `FULL` keeps a block's inputs;
    `SELECTIVE` also keeps the outputs of matmuls, convolutions and attention, so that only cheap
    operations run twice. Dropout draws the same numbers both times, and batch norms count a
    microbatch once.
    """
    if kind is Recompute.NONE:
        return
    for unit in profile.blocks():
        block = model.get_submodule(unit.name)
        contexts = functools.partial(_contexts, kind, _batch_norms(block))
        block.forward = _recomputed(block.forward, contexts)


def _recomputed(
    forward: Callable[..., object], contexts: Callable[[], Contexts]
) -> Callable[..., object]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> object:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run


def _contexts(kind: Recompute, batch_norms: list[nn.BatchNorm2d]) -> Contexts:
    """The contexts of the first and of the second run of a block."""
    first: AbstractContextManager[None]
    second: AbstractContextManager[None]
    if kind is Recompute.SELECTIVE:
        first, second = create_selective_checkpoint_contexts(list(kept_operators()))
    else:
        first, second = nullcontext(), nullcontext()
    return first, (_frozen_statistics(second, batch_norms) if batch_norms else second)


def _batch_norms(block: nn.Module) -> list[nn.BatchNorm2d]:
    return [
        module for module in block.modules() if is_batch_norm(module) and module.track_running_stats
    ]


@contextmanager
def _frozen_statistics(
    inner: AbstractContextManager[None], batch_norms: list[nn.BatchNorm2d]
) -> Iterator[None]:
    """The second run must not move running statistics a second time: momentum 0 leaves them."""
    kept = [(norm, norm.momentum, _count(norm).clone()) for norm in batch_norms]
    try:
        for norm, _, _ in kept:
            norm.momentum = 0.0
        with inner:
            yield
    finally:
        for norm, momentum, count in kept:
            norm.momentum = momentum
            with torch.no_grad():
                _count(norm).copy_(count)


def _count(norm: nn.BatchNorm2d) -> Tensor:
    assert norm.num_batches_tracked is not None  # it tracks running statistics
    return norm.num_batches_tracked
