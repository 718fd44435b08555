"""One rank of a job of many, in this process alone: the others are made up.

torch's fake process groups start every collective and exchange nothing. What a rank gets from the
others is whatever is in its buffers; what it sends, how often and to whom is as in the real job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import fake_pg

import engines.hybrid
from engines.microbatches import Cutter
from engines.world import World

assert fake_pg  # it registers the backend


class Agreeing(dist.Store):
    """A rendezvous store on which every rank says what this one says: keys end in a rank."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, bytes] = {}
        self._counts: Counter[str] = Counter()

    def set(self, key: str, value: str | bytes) -> None:
        self._said[_question(key)] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        return self._said[_question(key)]

    def add(self, key: str, amount: int) -> int:
        self._counts[key] += amount
        return self._counts[key]

    def check(self, keys: Sequence[str]) -> bool:
        return all(_question(key) in self._said for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        pass


def _question(key: str) -> str:
    return key.rpartition("/")[0]


@contextmanager
def fake_rank(rank: int, size: int) -> Iterator[World]:
    """Inside, this process is rank `rank` of `size`; all ranks are taken to have the same rows."""
    replicate = engines.hybrid.replicate

    def replicate_by_hook(model: nn.Module, **kwargs: Any) -> DistributedDataParallel:
        """DDP waits for a result that fake groups do not give; asked in Python, it is the same."""
        runner = replicate(model, **kwargs)
        runner.register_comm_hook(kwargs["group"], _all_reduced)
        return runner

    store = Agreeing()  # torch itself keeps only the part of it that is C++
    dist.init_process_group("fake", store=store, rank=rank, world_size=size)
    try:
        with (
            mock.patch.object(Cutter, "_require_same"),
            mock.patch("engines.hybrid.replicate", replicate_by_hook),
            # All stages say that they know their shapes: nothing is tried out beforehand.
            mock.patch.object(PipelineStage, "_warmup_backward_result", _is_static),
        ):
            yield World(rank=rank, size=size, device=torch.device("cpu"), timeout_s=60)
    finally:
        dist.destroy_process_group()


def _is_static(stage: PipelineStage, received_result: Tensor | None = None) -> Tensor:
    return torch.ones(1)


def _all_reduced(
    group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    dist.all_reduce(bucket.buffer(), group=group)
    found: torch.futures.Future[Tensor] = torch.futures.Future()
    found.set_result(bucket.buffer())
    return found


_all_reduced.__annotations__.clear()  # torch would compare these strings with types
