"""An optimizer's step, a few parameters at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    when a plan is applied (`engines.state.optimizer_footprint.why_not_chunked`).
    """
    groups = optimizer.param_groups
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


def _chunks(parameters: list[nn.Parameter], chunk_bytes: int) -> Iterator[list[nn.Parameter]]:
    chunk: list[nn.Parameter] = []
    for parameter in parameters:
        if chunk and sum(p.nbytes for p in chunk) + parameter.nbytes > chunk_bytes:
            yield chunk
            chunk = []
        chunk.append(parameter)
    if chunk:
        yield chunk
