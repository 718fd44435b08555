"""An optimizer's step, a few parameters at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def step_in_chunks(
    optimizer: torch.optim.Optimizer,
    own: Callable[[], Any],
    *,
    chunk_bytes: int,
    before: Callable[[nn.Parameter], None] = lambda parameter: None,
    after: Callable[[nn.Parameter], None] = lambda parameter: None,
) -> None:
    """Call `own`, the step of `optimizer`, on its parameters chunk by chunk.

    For optimizers that step every parameter by its own gradient and states; others are refused
    when a plan is applied (`engines.state.optimizer_parts.why_not_chunked`).
    """
    groups = optimizer.param_groups
    with _hooked_once(optimizer):
        try:
            for group in groups:
                everything = group["params"]
                try:
                    optimizer.param_groups = [group]
                    for chunk in _chunks(everything, chunk_bytes):
                        for parameter in chunk:
                            before(parameter)
                        group["params"] = chunk
                        own()
                        for parameter in chunk:
                            after(parameter)
                finally:
                    group["params"] = everything
        finally:
            optimizer.param_groups = groups


@contextmanager
def _hooked_once(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Around the steps of all chunks: hooks are called before the first and after the last. They
    count steps, and advance schedules."""
    first, last = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    for hook in list(first.values()):
        hook(optimizer, (), {})
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks = first
        optimizer._optimizer_step_post_hooks = last
    for hook in list(last.values()):
        hook(optimizer, (), {})


def _chunks(parameters: list[nn.Parameter], chunk_bytes: int) -> Iterator[list[nn.Parameter]]:
    chunk: list[nn.Parameter] = []
    for parameter in parameters:
        if chunk and sum(p.nbytes for p in chunk) + parameter.nbytes > chunk_bytes:
            yield chunk
            chunk = []
        chunk.append(parameter)
    if chunk:
        yield chunk
