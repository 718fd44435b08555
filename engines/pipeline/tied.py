"""Parameters that several stages use: a copy on each owner, one gradient for all copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Tie:
    """Trainable parameters that the same ranks hold copies of. `group` is None for all ranks."""

    names: tuple[str, ...]
    group: dist.ProcessGroup | None


def ties_of(
    owners: Mapping[str, Sequence[int]],
    *,
    world_size: int,
    trainable: Iterable[str],
    timeout_s: float,
) -> tuple[Tie, ...]:
    """The parameters with several owners, by who owns them; all ranks call it.

    Returns those of this rank, in the same order on all of them. Every rank takes part in making
    every group, as torch asks.

    Args:
        owners: ascending global ranks by name of parameter.
        timeout_s: of the collectives of these groups.
    """
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name in trainable:
        if len(owners[name]) > 1:
            by_ranks.setdefault(tuple(owners[name]), []).append(name)
    found = []
    for ranks, names in sorted(by_ranks.items()):
        group = None
        if len(ranks) < world_size:
            group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
        if dist.get_rank() in ranks:
            found.append(Tie(tuple(names), group))
    return tuple(found)


@torch.no_grad()
def sum_gradients(ties: Iterable[Tie], model: nn.Module) -> None:
    """Give every copy the sum of the gradients of all copies.

    A copy without a gradient counts as zero; where none has one, none gets one. The copies began
    equal and are stepped by equal gradients, so they stay equal.
    """
    for tie in ties:
        parameters = [model.get_parameter(name) for name in tie.names]
        device = parameters[0].device
        has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.float32)
        has = has.to(device)
        dist.all_reduce(has, group=tie.group)
        for parameter, holders in zip(parameters, has.tolist(), strict=True):
            if not holders:
                continue
            gradient = _dense(parameter)
            dist.all_reduce(gradient, group=tie.group)
            parameter.grad = gradient


def _dense(parameter: nn.Parameter) -> Tensor:
    """Its gradient, or zeros; contiguous, as collectives want it."""
    gradient = parameter.grad
    return torch.zeros_like(parameter) if gradient is None else gradient.contiguous()
