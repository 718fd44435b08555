"""Runs on ranks of the pool: a small model under asynchronous or periodic updates."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engines.parallel import ParallelModel
from engines.runtime.world import World
from profiles.capture.batch.call import Batch
from tests.engines.cases import CASES, Case
from tests.engines.parity import local_rows, reference_loss, sgd, spread

GPT = CASES["gpt"]


def patience(seconds: float, *, size: int) -> World:
    """A world whose waits are short, for tests in which somebody waits in vain."""
    import torch.distributed as dist

    return World(rank=dist.get_rank(), size=size, device=torch.device("cpu"), timeout_s=seconds)


def one_process(reference: nn.Module, case: Case, batches: list[Batch]) -> list[float]:
    """Losses of the same steps without anything parallel; `reference` is trained."""
    optimizer = sgd([p for p in reference.parameters() if p.requires_grad])
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = reference_loss(reference, case, batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


def drift(parallel: ParallelModel, reference: nn.Module) -> float:
    """The largest difference of the parameters of all ranks, relative to the largest value."""
    wanted = reference.state_dict()
    state = parallel.state_dict()
    assert list(state) == list(wanted)
    return max(
        float((state[name] - value).abs().max() / value.abs().max().clamp(min=1e-30))
        for name, value in wanted.items()
    )


def trained(
    plan: str, rows: list[int], *, case: Case = GPT, **options: Any
) -> tuple[nn.Module, ParallelModel, list[float], list[Batch]]:
    """A reference that was left alone, the model after a step for each of `rows`, its losses."""
    reference, parallel = spread(case, plan, **options)
    batches = [case.batch(count) for count in rows]
    losses = [
        parallel.train_step(local_rows(parallel, batch, count)).item()
        for batch, count in zip(batches, rows, strict=True)
    ]
    return reference, parallel, losses, batches
