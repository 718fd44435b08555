"""Number of collectives in one step."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engines.data import replicas
from tests.engines.parity import local_rows, parallelize
from tests.workers import Pool


class _Collectives(TorchDispatchMode):
    """Counts the collective operations that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[func.__name__.split(".")[0].strip("_")] += 1
        return func(*args, **(kwargs or {}))


def _count_collectives(plan: str) -> Counter[str]:
    case, _, parallel = parallelize("gpt", plan)
    batch = local_rows(parallel, case.batch(8), 8)
    parallel.train_step(batch)
    with _Collectives() as mode:
        parallel.train_step(batch)
    return mode.counts


@pytest.mark.dist
def test_accumulation_exchanges_gradients_no_more_often_than_sharding_needs(pool: Pool) -> None:
    once = pool.run(_count_collectives, "dp_replicate=2 zero=1", world_size=2)[0]
    four = pool.run(_count_collectives, "dp_replicate=2 zero=1 accumulation=4", world_size=2)[0]
    assert once == four  # parameters gathered once, gradients scattered once
    zero2 = pool.run(_count_collectives, "dp_replicate=2 zero=2 accumulation=4", world_size=2)[0]
    scatter = next(name for name in once if "reduce_scatter" in name)
    gather = next(name for name in once if "allgather" in name)
    assert zero2[gather] == once[gather]
    assert zero2[scatter] == 4 * once[scatter]


def _ddp_reductions(accumulation: int) -> int:
    """Gradient buckets all-reduced in one step, counted by a communication hook."""
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    case, _, parallel = parallelize("gpt", f"dp_replicate=2 accumulation={accumulation}")
    seen = []

    def counting(state: object, bucket: Any) -> Any:
        seen.append(bucket.index())
        return allreduce_hook(None, bucket)

    counting.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
    parallel._runner.register_comm_hook(None, counting)  # type: ignore[attr-defined]
    parallel.train_step(local_rows(parallel, case.batch(8), 8))
    return len(seen)


@pytest.mark.dist
def test_ddp_reduces_gradients_once_however_many_microbatches(pool: Pool) -> None:
    assert pool.run(_ddp_reductions, 4, world_size=2) == pool.run(_ddp_reductions, 1, world_size=2)


def _averaged_in_buckets() -> tuple[int, list[Tensor]]:
    """(messages, means) of five fp32 tensors and two fp64 ones, in four buckets."""
    rank = dist.get_rank()
    kinds = [torch.float32] * 3 + [torch.float64] * 2 + [torch.float32] * 2
    tensors = [torch.full((2, n + 1), n + 10.0 * rank, dtype=kind) for n, kind in enumerate(kinds)]
    with mock.patch.object(replicas, "BUCKET_BYTES", 60), _Collectives() as mode:
        replicas.sum_flat(tensors, None, divisor=2)
    return mode.counts["allreduce"], tensors


@pytest.mark.dist
def test_the_tensors_of_every_bucket_are_averaged(pool: Pool) -> None:
    for messages, tensors in pool.run(_averaged_in_buckets, world_size=2):
        assert messages == 4
        for number, tensor in enumerate(tensors):
            assert torch.equal(tensor, torch.full_like(tensor, number + 5.0))
