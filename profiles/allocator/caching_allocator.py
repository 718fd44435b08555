"""A simulation of torch's CUDA caching allocator: segments, blocks, splits and merges.

It follows `c10/cuda/CUDACachingAllocator.cpp` for one stream on a device with enough memory: what
`torch.cuda.memory_allocated` and `memory_reserved` would say after a sequence of allocations.
Expandable segments, rounding to powers of two, garbage collection, the private pools of CUDA graphs
and `max_split_size_mb` are off there by default and are not simulated.
"""

from __future__ import annotations

from bisect import bisect_left

from profiles.allocator.memory_pool import MemoryBlock, Pool
from profiles.units import MIB

# The constants of the C++ source, with their names there.
MIN_BLOCK_BYTES = 512  # kMinBlockSize: sizes of blocks are multiples of it
SMALL_BYTES = MIB  # kSmallSize: the largest block of the small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer
MIN_LARGE_BYTES = 10 * MIB  # kMinLargeAlloc: from here on a segment is sized for one request,
ROUND_LARGE_BYTES = 2 * MIB  # kRoundLarge: in multiples of this


def rounded_bytes(nbytes: int) -> int:
    """The size of the block that a request needs (`round_size`)."""
    return -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES or MIN_BLOCK_BYTES


def segment_bytes(block_bytes: int) -> int:
    """Bytes requested from the driver for a block that is not cached (`get_allocation_size`)."""
    if block_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-block_bytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


class CachingAllocator:
    """The allocator of one device.

    >>> allocator = CachingAllocator()
    >>> weight = allocator.allocate(3 * 2**20)
    >>> allocator.allocated_bytes / 2**20, allocator.reserved_bytes / 2**20
    (3.0, 20.0)
    >>> allocator.free(weight)
    >>> allocator.allocated_bytes, allocator.reserved_bytes / 2**20
    (0, 20.0)
    """

    def __init__(self) -> None:
        self._small, self._large = Pool(is_small=True), Pool(is_small=False)
        self._taken: dict[int, MemoryBlock] = {}
        self._next_address = LARGE_SEGMENT_BYTES
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = 0  # never falls: nothing goes back to the driver

    def allocate(self, nbytes: int) -> int:
        """Take memory; its address. 0 for no bytes, which take no memory."""
        if nbytes == 0:
            return 0
        size = rounded_bytes(nbytes)
        pool = self._small if size <= SMALL_BYTES else self._large
        block = self._cached(pool, size) or self._fresh(pool, size)
        rest_bytes = block.size - size
        if rest_bytes >= MIN_BLOCK_BYTES and (pool.is_small or rest_bytes > SMALL_BYTES):
            pool.add(block.cut(size))
        block.is_free = False
        self._taken[block.address] = block
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block.address

    def free(self, address: int) -> None:
        """Give back what `allocate` returned; it stays reserved."""
        if address == 0:
            return
        block = self._taken.pop(address)
        block.is_free = True
        self.allocated_bytes -= block.size
        block.pool.add_merged(block)

    def block_bytes(self, address: int) -> int:
        """The size of the block at an address that was allocated."""
        return self._taken[address].size

    def _cached(self, pool: Pool, size: int) -> MemoryBlock | None:
        """The smallest free block that is large enough."""
        number = bisect_left(pool.free, (size, 0))
        if number == len(pool.free):
            return None
        block = pool.blocks[pool.free[number][1]]
        pool.remove(block)
        return block

    def _fresh(self, pool: Pool, size: int) -> MemoryBlock:
        """A segment of memory that was not reserved before."""
        whole = segment_bytes(size)
        self.reserved_bytes += whole
        block = MemoryBlock(pool, self._next_address, whole)
        self._next_address += whole
        return block
