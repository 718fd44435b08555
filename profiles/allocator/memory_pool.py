"""Blocks of a device's memory, and the pools in which free ones wait."""

from __future__ import annotations

from bisect import bisect_left, insort


class MemoryBlock:
    """A range of addresses in a segment, with its neighbours there."""

    __slots__ = ("address", "is_free", "is_mapped", "next", "pool", "previous", "size")

    def __init__(self, pool: Pool, address: int, size: int, *, is_mapped: bool) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.is_mapped = is_mapped
        self.is_free = True
        self.previous: MemoryBlock | None = None
        self.next: MemoryBlock | None = None

    def cut(self, size: int) -> MemoryBlock:
        """Keep the first `size` bytes; the rest becomes a block of its own."""
        rest = MemoryBlock(
            self.pool, self.address + size, self.size - size, is_mapped=self.is_mapped
        )
        self.size = size
        rest.previous, rest.next, self.next = self, self.next, rest
        if rest.next is not None:
            rest.next.previous = rest
        return rest

    def merge_next(self) -> None:
        following = self.next
        assert following is not None
        self.size += following.size
        self.next = following.next
        if self.next is not None:
            self.next.previous = self

    @property
    def is_split(self) -> bool:
        return self.previous is not None or self.next is not None

    @property
    def expandable_bytes(self) -> int:
        """Its own size plus the unmapped addresses after it."""
        following = self.next
        return self.size + (following.size if following and not following.is_mapped else 0)


class Pool:
    """The free blocks for small or for large requests.

    `free` has them by (size, address), as the allocator orders them; `unmapped` the addresses of
    expandable segments without memory behind them.

    Args:
        step_bytes: by which expandable segments grow.
    """

    def __init__(self, *, is_small: bool, step_bytes: int) -> None:
        self.is_small = is_small
        self.step_bytes = step_bytes
        self.blocks: dict[int, MemoryBlock] = {}  # what `free` and `unmapped` name, by address
        self.free: list[tuple[int, int]] = []
        self.unmapped: list[int] = []

    def add(self, block: MemoryBlock) -> None:
        self.blocks[block.address] = block
        if block.is_mapped:
            insort(self.free, (block.size, block.address))
        else:
            insort(self.unmapped, block.address)

    def remove(self, block: MemoryBlock) -> None:
        del self.blocks[block.address]
        if block.is_mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, block.address)]

    def add_merged(self, block: MemoryBlock) -> MemoryBlock:
        """Add a block, as one with the free neighbours that are mapped as it is."""
        before, after = block.previous, block.next
        if after is not None and after.is_free and after.is_mapped == block.is_mapped:
            self.remove(after)
            block.merge_next()
        if before is not None and before.is_free and before.is_mapped == block.is_mapped:
            self.remove(before)
            before.merge_next()
            block = before
        self.add(block)
        return block
