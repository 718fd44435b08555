"""Parameters that several stages use: a copy on each owner, one gradient for all copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from engines.data.replicas import sum_gradients
from engines.runtime.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Tie:
    """Trainable parameters that the stages of the same ranks hold copies of."""

    names: tuple[str, ...]
    group: dist.ProcessGroup | None


def ties_of(
    owners: Mapping[str, Sequence[int]], *, mesh: Mesh, trainable: Iterable[str]
) -> tuple[Tie, ...]:
    """Group the parameters with several owners by their owners; all ranks call it.

    Returns those of this rank, in the same order on all of them.

    Args:
        owners: ascending positions on the pp axis by name of parameter.
    """
    by_positions: dict[tuple[int, ...], list[str]] = {}
    for name in trainable:
        if len(owners[name]) > 1:
            by_positions.setdefault(tuple(owners[name]), []).append(name)
    ties = []
    for positions, names in sorted(by_positions.items()):
        group = mesh.between_stages(positions)
        if mesh.pp.position in positions:
            ties.append(Tie(tuple(names), group))
    return tuple(ties)


def sum_ties(ties: Iterable[Tie], model: nn.Module) -> None:
    """Give every copy the sum of the gradients of all copies.

    The copies began equal and are stepped by equal gradients, so they stay equal.
    """
    for tie in ties:
        sum_gradients([model.get_parameter(name) for name in tie.names], tie.group)
