"""Chunks of a tensor that this rank has: boxes with offsets in the whole.

A slice of the tp axis may be several chunks (a third of it of the query, a third of the key, a
third of the value), and FSDP2 may have cut it once more along its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from engines.state.slices import Slice, share
from profiles.torch_compat import offsets_of_shard


@dataclass(frozen=True, slots=True)
class Chunk:
    """`part`, a view of this rank's part, at `offsets` in the whole."""

    offsets: tuple[int, ...]
    part: Tensor


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """This rank's chunks of a tensor of shape `whole`."""

    whole: torch.Size
    chunks: tuple[Chunk, ...]


def placed(tensor: Tensor) -> PlacedTensor:
    """A tensor that this rank has whole, or a shard of one."""
    local, offsets = tensor.detach(), (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        local, offsets = tensor.to_local().detach(), offsets_of_shard(tensor)
    has_any = bool(local.numel()) or not tensor.numel()
    return PlacedTensor(tensor.shape, (Chunk(offsets, local),) if has_any else ())


def placed_slice(
    tensor: Tensor, cut: Slice, *, shape: torch.Size, rank: int, size: int
) -> PlacedTensor:
    """The part of rank `rank` of `size`: a slice by `cut` of a tensor of `shape`, or a shard of
    that along its first dimension."""
    local, first_row = tensor.detach(), 0
    if isinstance(tensor, DTensor):
        local, first_row = tensor.to_local().detach(), offsets_of_shard(tensor)[0]
    return PlacedTensor(shape, tuple(_boxes(local, first_row, cut, shape, rank, size)))


def _boxes(
    local: Tensor, first_row: int, cut: Slice, shape: torch.Size, rank: int, size: int
) -> Iterator[Chunk]:
    """One for each pack; none that are empty."""
    dim = cut.dim % len(shape)
    pack = shape[dim] // cut.packs
    start, length = share(pack, rank, size)
    for number in range(cut.packs):
        offsets = [0] * len(shape)
        if dim:
            offsets[0] = first_row
            part = local.narrow(dim, number * length, length)
            offsets[dim] = number * pack + start
        else:
            # Rows [low, high) of the slice are of this pack and in this shard.
            low = max(number * length, first_row)
            high = min((number + 1) * length, first_row + local.shape[0])
            part = local.narrow(0, low - first_row, max(high - low, 0)) if high > low else local[:0]
            offsets[0] = number * pack + start + low - number * length
        if part.numel():
            yield Chunk(tuple(offsets), part)
