"""One rank of a job of many, in this process alone: the others are made up.

torch's fake process groups start every collective and exchange nothing. What a rank gets from the
others is whatever is in its buffers; what it sends, how often and to whom is as in the real job.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from engines.runtime.fake_world import fake_world
from engines.runtime.world import World


@contextmanager
def fake_rank(rank: int, size: int) -> Iterator[World]:
    """Inside, this process is rank `rank` of `size`; all ranks are taken to have the same rows."""
    with _all_static(), fake_world(rank, size, torch.device("cpu")) as world:
        yield world


def _all_static() -> AbstractContextManager[object]:
    """All stages say that they know their shapes: nothing is tried out beforehand. torch 2.15 takes
    each stage's word for itself."""
    name = "_warmup_backward_result"
    has_vote = hasattr(PipelineStage, name)
    return mock.patch.object(PipelineStage, name, _is_static) if has_vote else nullcontext()


def _is_static(stage: PipelineStage, received_result: Tensor | None = None) -> Tensor:
    return torch.ones(1)
