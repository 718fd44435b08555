"""Tensors of one rank, sent to the others of its group: many small ones in one message."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from profiles.units import MIB

BUCKET_BYTES = 32 * MIB  # many small tensors in one message, and a copy that is never large


@torch.no_grad()
def send_from_first(
    tensors: Iterable[Tensor],
    device: torch.device,
    *,
    group: dist.ProcessGroup | None = None,
    source: int = 0,
) -> None:
    """Broadcast the tensors of the rank at position `source` in `group`, its first by default, to
    all ranks of it; None: to all ranks."""
    bucket: list[Tensor] = []
    nbytes = 0
    for tensor in tensors:
        if tensor.is_meta:
            continue  # every rank fills it from the same weights
        if any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)):
            continue  # expanded: elements share memory, which cannot be written
        bucket.append(tensor.detach())
        nbytes += tensor.nbytes
        if nbytes >= BUCKET_BYTES:
            start_broadcast(bucket, device, group=group, source=source)()
            bucket, nbytes = [], 0
    start_broadcast(bucket, device, group=group, source=source)()


@torch.no_grad()
def start_broadcast(
    tensors: list[Tensor],
    device: torch.device,
    *,
    group: dist.ProcessGroup | None = None,
    source: int = 0,
) -> Callable[[], None]:
    """Send `tensors` as they are now, in one message of bytes, whatever their dtypes; the result
    waits for it and, on ranks other than `source`, writes what came into them."""
    if not tensors:
        return lambda: None
    # Larger elements first, so that every dtype begins on a boundary of its own.
    order = sorted(tensors, key=lambda tensor: (-tensor.element_size(), str(tensor.dtype)))
    alike = [list(each) for _, each in groupby(order, key=lambda tensor: tensor.dtype)]
    staged = torch.cat([_flat(each, device).view(torch.uint8) for each in alike])
    work = dist.broadcast(staged, group=group, group_src=source, async_op=True)

    @torch.no_grad()
    def finish() -> None:
        if work is not None:  # of fake groups there is none
            work.wait()
        if dist.get_rank(group) == source:
            return
        parts = staged.split([sum(tensor.nbytes for tensor in each) for each in alike])
        for tensors, part in zip(alike, parts, strict=True):
            values = part.view(tensors[0].dtype).split([tensor.numel() for tensor in tensors])
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value.view_as(tensor))

    return finish


def _flat(tensors: list[Tensor], device: torch.device) -> Tensor:
    return torch.cat([tensor.reshape(-1).to(device) for tensor in tensors])
