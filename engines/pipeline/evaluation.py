"""Forward-only rounds, which torch's schedules of several stages do not have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from engines.pipeline.recording import Recording
from engines.pipeline.stage import Stage, buffers
from engines.runtime.mesh import Axis


@torch.no_grad()
def forward_only(
    stages: Sequence[Stage],
    recording: Recording,
    *,
    microbatches: int,
    rank_of_stage: Callable[[int], int],
    axis: Axis,
    device: torch.device,
) -> Tensor:
    """The sum of the losses of the round, 0-d; zero where the last stage is not.

    Ranks wait for their inputs only, so several microbatches are in flight at once.

    Args:
        rank_of_stage: the position on `axis`, the pp axis, of the rank that drives a stage.
    """
    total = torch.zeros((), device=device)
    for number in torch.arange(microbatches).split(1):
        values: tuple[Tensor, ...] = ()
        for stage in stages:
            index, rank = stage.segment.index, axis.position
            source = rank_of_stage(index - 1) if index else rank
            if source != rank:
                values = buffers(stage.segment.received, recording, device)
                for tensor in values:
                    dist.recv(tensor, src=axis.ranks[source], group=axis.group)
            output = stage(*values, microbatch=number)
            if isinstance(output, Tensor):
                total += output.reshape(())
                continue
            values, target = output, rank_of_stage(index + 1)
            if target != rank:
                for tensor in values:
                    dist.send(tensor, dst=axis.ranks[target], group=axis.group)
    return total
