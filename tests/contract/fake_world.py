"""One rank of a job of many, in this process alone: the others are made up.

torch's fake process groups start every collective and exchange nothing. What a rank gets from the
others is whatever is in its buffers; what it sends, how often and to whom is as in the real job.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from engines.runtime.fake_world import fake_world
from engines.runtime.world import World


@contextmanager
def fake_rank(rank: int, size: int) -> Iterator[World]:
    """Inside, this process is rank `rank` of `size`; all ranks are taken to have the same rows."""
    # All stages say that they know their shapes: nothing is tried out beforehand.
    static = mock.patch.object(PipelineStage, "_warmup_backward_result", _is_static)
    with static, fake_world(rank, size, torch.device("cpu")) as world:
        yield world


def _is_static(stage: PipelineStage, received_result: Tensor | None = None) -> Tensor:
    return torch.ones(1)
