"""DistributedDataParallel's communication hook: how a bucket of gradients becomes their mean.

DDP looks at the annotations of a hook, so that here they are types and not text.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from engines.optional.aggregation.aggregate import aggregate
from engines.plan import Aggregation, Compression, Plan

# The first step that PowerSGD compresses. DDP cuts its buckets anew after the first one, and torch
# refuses less; the paper (Vogels et al. 2019, algorithm 2) compresses from the start. torch's own
# default, 1,000 plain steps, would be as slow as uncompressed gradients.
FIRST_COMPRESSED_STEP = 2
# Keeps the factors of a gradient of zeros from being 0 / 0; torch's documentation suggests it.
ORTHOGONALISATION_EPSILON = 1e-8


@dataclass(slots=True)
class BucketSums:
    """The aggregation of buckets, and its stream: on a GPU it overlaps the backward."""

    group: dist.ProcessGroup
    kind: Aggregation
    per_node: int
    streams: dict[torch.device, torch.cuda.Stream] = field(default_factory=dict)

    @contextmanager
    def overlapped(self, device: torch.device) -> Iterator[None]:
        """Launch inside after all earlier work of the device, without delaying the backward."""
        if device.type != "cuda":
            yield
            return
        stream = self.streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield


@dataclass(slots=True)
class PowerSGDBuckets:
    """PowerSGD's state, and the latest bucket.

    Attributes:
        elements: of all buckets.
    """

    state: PowerSGDState
    elements: int
    latest: Future[Tensor] | None = None

    def state_dict(self) -> dict[str, Any]:
        """This rank's error feedback, the factors that the next step begins with, and the steps."""
        known = self._buckets()
        return {
            "rank": self.state.matrix_approximation_rank,
            "steps": self.state.iter,
            "buckets": [[of[number] for of in known] for number in sorted(known[0])],
        }

    def load_state_dict(self, saved: Mapping[str, Any], device: torch.device) -> bool:
        """The inverse, for the same parameters in the same buckets; False, with nothing changed,
        where `saved` is of others."""
        steps, buckets = saved.get("steps"), saved.get("buckets")
        if not isinstance(steps, int) or not isinstance(buckets, list):
            return False
        is_known = saved.get("rank") == self.state.matrix_approximation_rank
        if not is_known or not all(_is_bucket(bucket) for bucket in buckets):
            return False
        if buckets and sum(error.numel() for error, _, _ in buckets) != self.elements:
            return False
        self.state.iter = steps
        for position, of in enumerate(self._buckets()):
            of.clear()
            of.update({n: bucket[position].to(device) for n, bucket in enumerate(buckets)})
        return True

    def _buckets(self) -> tuple[dict[int, Tensor], dict[int, Tensor], dict[int, Tensor]]:
        """Errors and both factors, by bucket."""
        state = self.state
        return state.error_dict, state.p_memory_dict, state.q_memory_dict


def _is_bucket(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 3:
        return False
    return all(isinstance(each, Tensor) and each.dim() == 1 for each in value)


def register_gradient_hook(
    runner: DistributedDataParallel,
    plan: Plan,
    *,
    group: dist.ProcessGroup,
    per_node: int,
) -> None:
    """Let `runner` exchange gradients as `plan` says; once, before the first backward.

    Args:
        group: the replicas.
        per_node: consecutive replicas that share a node.
    """
    if plan.compression is Compression.POWERSGD:
        factors = PowerSGDState(
            group,
            matrix_approximation_rank=plan.compression_rank,
            start_powerSGD_iter=FIRST_COMPRESSED_STEP,
            orthogonalization_epsilon=ORTHOGONALISATION_EPSILON,
        )
        elements = sum(p.numel() for p in runner.module.parameters() if p.requires_grad)
        runner.register_comm_hook(PowerSGDBuckets(factors, elements), factorised)
        return
    sums = BucketSums(group, plan.aggregation, per_node)
    if plan.compression is Compression.BF16:
        runner.register_comm_hook(sums, compressed)
    elif plan.aggregation is not Aggregation.BACKEND:
        runner.register_comm_hook(sums, summed_up)


def summed_up(sums: BucketSums, bucket: dist.GradBucket) -> Future[Tensor]:
    """The mean of a bucket over the replicas, by the messages of `sums.kind`."""
    return _mean(sums, bucket.buffer())


def compressed(sums: BucketSums, bucket: dist.GradBucket) -> Future[Tensor]:
    """`summed_up` in bfloat16, half of the bytes: divided first, so that sums stay in its range."""
    if sums.kind is Aggregation.BACKEND:
        return default_hooks.bf16_compress_hook(sums.group, bucket)
    whole = bucket.buffer()
    return _mean(sums, whole.to(torch.bfloat16)).then(lambda mean: whole.copy_(mean.value()))


def factorised(factors: PowerSGDBuckets, bucket: dist.GradBucket) -> Future[Tensor]:
    """PowerSGD: the mean of a bucket's matrices as far as their factors go.

    Its second and third sum begin when the one before is done. gloo's end at other moments on every
    rank, so that sums of two buckets would mix: there a bucket waits for the one before.
    """
    if factors.latest is not None and bucket.buffer().device.type == "cpu":
        factors.latest.wait()
    factors.latest = powerSGD_hook(factors.state, bucket)
    return factors.latest


def _mean(sums: BucketSums, values: Tensor) -> Future[Tensor]:
    group, device = sums.group, values.device
    done: Future[Tensor] = Future(devices=[device] if device.type == "cuda" else [])
    with sums.overlapped(device):
        values.div_(dist.get_world_size(group))
        aggregate(values, group, kind=sums.kind, per_node=sums.per_node)
        done.set_result(values)
    return done
