"""Slices: the part of a whole tensor that a rank of the tp axis holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slice:
    """Every rank's share along one dimension.

    The whole is `packs` equal tensors side by side along `dim` (a fused query, key and value are
    three), and every rank has the same part of each. Sizes that do not divide go as `torch.chunk`
    deals them out: the first ranks have more, the last may have none.
    """

    dim: int
    packs: int = 1

    def part(self, whole: Tensor, *, rank: int, size: int) -> Tensor:
        """The share of `rank` among `size` ranks; a view where that is possible."""
        parts = [
            pack.narrow(self.dim, *share(pack.shape[self.dim], rank, size))
            for pack in whole.chunk(self.packs, self.dim)
        ]
        return parts[0] if self.packs == 1 else torch.cat(parts, self.dim)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """The tensor that `parts` are the shares of, in the order of ranks."""
        packs = [part.chunk(self.packs, self.dim) for part in parts]
        return torch.cat([pack[n] for n in range(self.packs) for pack in packs], self.dim)

    def gather(self, part: Tensor, *, group: dist.ProcessGroup | None) -> Tensor:
        """The whole, on every rank of the group; all of them call it."""
        size = dist.get_world_size(group)
        sizes = torch.zeros(size, dtype=torch.int64)
        sizes[dist.get_rank(group)] = part.shape[self.dim]
        sizes = sizes.to(part.device)
        dist.all_reduce(sizes, group=group)
        places = [list(part.shape) for _ in range(size)]
        for place, length in zip(places, sizes.tolist(), strict=True):
            place[self.dim] = length
        parts = [part.new_empty(place) for place in places]
        parts[dist.get_rank(group)] = part.detach().contiguous()
        for number, tensor in enumerate(parts):  # shares may differ in size
            dist.broadcast(tensor, group=group, group_src=number)
        return self.whole(parts)


def share(length: int, rank: int, size: int) -> tuple[int, int]:
    """Start and length of a rank's share of `length` elements."""
    each = -(-length // size)
    start = min(rank * each, length)
    return start, min(each, length - start)
