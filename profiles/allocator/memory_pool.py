"""Blocks of a device's memory, and the pools in which free ones wait."""

from __future__ import annotations

from bisect import bisect_left, insort


class MemoryBlock:
    """A range of addresses in a segment, with its neighbours there."""

    __slots__ = ("address", "is_free", "next", "pool", "previous", "size")

    def __init__(self, pool: Pool, address: int, size: int) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.is_free = True
        self.previous: MemoryBlock | None = None
        self.next: MemoryBlock | None = None

    def cut(self, size: int) -> MemoryBlock:
        """Keep the first `size` bytes; the rest becomes a block of its own."""
        rest = MemoryBlock(self.pool, self.address + size, self.size - size)
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


class Pool:
    """The free blocks for small or for large requests.

    `free` has them by (size, address), as the allocator orders them; `blocks` by address.
    """

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.blocks: dict[int, MemoryBlock] = {}
        self.free: list[tuple[int, int]] = []

    def add(self, block: MemoryBlock) -> None:
        self.blocks[block.address] = block
        insort(self.free, (block.size, block.address))

    def remove(self, block: MemoryBlock) -> None:
        del self.blocks[block.address]
        del self.free[bisect_left(self.free, (block.size, block.address))]

    def add_merged(self, block: MemoryBlock) -> None:
        """Add a block, as one with its free neighbours."""
        before, after = block.previous, block.next
        if after is not None and after.is_free:
            self.remove(after)
            block.merge_next()
        if before is not None and before.is_free:
            self.remove(before)
            before.merge_next()
            block = before
        self.add(block)
