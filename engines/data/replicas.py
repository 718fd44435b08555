"""Sums of gradients over the ranks that hold the same parameters, in flat messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from profiles.units import MIB

BUCKET_BYTES = 25 * MIB  # as DistributedDataParallel's `bucket_cap_mb`


@torch.no_grad()
def sum_gradients(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None, *, divisor: int = 1
) -> None:
    """Give every rank of `group` the sum of its ranks' gradients over `divisor`; all call it.

    A rank without a gradient counts as zero; where none has one, none gets one. Of sharded
    parameters the shards are summed, which the ranks of the group must hold alike.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        return
    has = torch.tensor([float(p.grad is not None) for p in trainable])
    has = has.to(local_part(trainable[0]).device)
    dist.all_reduce(has, group=group)
    summed = [p for p, holders in zip(trainable, has.tolist(), strict=True) if holders]
    for parameter in summed:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [local_part(p.grad) for p in summed if p.grad is not None]
    sum_flat(gradients, group, divisor=divisor)


@torch.no_grad()
def sum_flat(
    tensors: Sequence[Tensor], group: dist.ProcessGroup | None, *, divisor: int = 1
) -> None:
    """Give `tensors` of every rank of `group` the sum of its ranks' over `divisor`, in place."""
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(flat, group=group)
        flat /= divisor
        for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def has_gradient(parameter: nn.Parameter) -> bool:
    """True if this rank's part of the gradient is there and not zero."""
    return parameter.grad is not None and bool(local_part(parameter.grad).any())


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype in their order, until a bucket is full."""
    filling: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        bucket = filling.setdefault(tensor.dtype, [])
        bucket.append(tensor)
        if sum(t.nbytes for t in bucket) >= BUCKET_BYTES:
            yield filling.pop(tensor.dtype)
    yield from filling.values()
