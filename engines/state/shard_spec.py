"""Shards of tensors for torch.distributed.checkpoint: chunks with offsets in the whole.

Offsets of DTensor's shards are known to torch. A slice of the tp axis may be several chunks (a
third of it of the query, a third of the key, a third of the value), and FSDP2 may have cut it once
more along its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from engines.state.slices import Slice, share
from profiles.torch_compat import rows_of_shard


@dataclass(frozen=True, slots=True)
class Chunk:
    """`part`, a view of this rank's part, at `offsets` in the whole."""

    offsets: torch.Size
    part: Tensor


class PlacedTensor(Tensor):
    """This rank's part of a tensor of shape `whole`; shares the memory of the part.

    The methods with two underscores are torch.distributed.checkpoint's protocol of tensors.
    """

    whole: torch.Size
    chunks: tuple[Chunk, ...]

    def size(self, dim: int | None = None) -> torch.Size | int:  # type: ignore[override]
        return self.whole if dim is None else self.whole[dim]

    def __create_write_items__(self, name: str, tensor: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, own.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(own.part),
                    size=self.whole,
                ),
            )
            for own, chunk in zip(self.chunks, self.__create_chunk_list__(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(own.offsets, own.part.size()) for own in self.chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(own.part for own in self.chunks if own.offsets == index.offset)


def placed(tensor: Tensor, cut: Slice, *, shape: torch.Size, rank: int, size: int) -> PlacedTensor:
    """`tensor` is what rank `rank` of `size` holds of a tensor of `shape` that is split as `cut`
    says, or a shard of that along its first dimension."""
    local, first_row = tensor.detach(), 0
    if isinstance(tensor, DTensor):
        local, first_row = tensor.to_local().detach(), rows_of_shard(tensor)
    result = local.as_subclass(PlacedTensor)
    result.whole = shape
    result.chunks = tuple(_boxes(local, first_row, cut, shape, rank, size))
    return result


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
            yield Chunk(torch.Size(offsets), part)
