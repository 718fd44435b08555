"""A simulation of torch's CUDA caching allocator: segments, blocks, splits and merges.

It follows `c10/cuda/CUDACachingAllocator.cpp` for one stream: what `torch.cuda.memory_allocated`
and `memory_reserved` would say after a sequence of allocations. Garbage collection, the private
pools of CUDA graphs and `max_split_size_mb` are off there by default and are not simulated.
"""

from __future__ import annotations

from bisect import bisect_left

from profiles.allocator.memory_pool import MemoryBlock, Pool
from profiles.errors import AdvisorError
from profiles.units import MIB, format_gib

# The constants of the C++ source, with their names there.
MIN_BLOCK_BYTES = 512  # kMinBlockSize: sizes of blocks are multiples of it
SMALL_BYTES = MIB  # kSmallSize: the largest block of the small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer
MIN_LARGE_BYTES = 10 * MIB  # kMinLargeAlloc: from here on a segment is sized for one request,
ROUND_LARGE_BYTES = 2 * MIB  # kRoundLarge: in multiples of this
# An expandable segment has addresses for 9/8 of the device's memory; without a limit, for any.
ADDRESS_SPACE_BYTES = 2**46


class OutOfMemoryError(AdvisorError):
    """A request fits neither a cached block nor what the limit leaves."""


def rounded_bytes(nbytes: int, power2_divisions: int = 0) -> int:
    """The size of the block that a request needs (`round_size`)."""
    if power2_divisions > 1 and nbytes > MIN_BLOCK_BYTES * power2_divisions:
        return next_division(nbytes, power2_divisions)
    return -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES or MIN_BLOCK_BYTES


def next_division(nbytes: int, divisions: int) -> int:
    """The next of `divisions` even steps that lead from the power of two below to the one above.

    >>> next_division(1200, 4)  # of 1024, 1280, 1536, 1792, 2048
    1280
    """
    floor = 1 << (nbytes.bit_length() - 1)
    step = floor >> (divisions.bit_length() - 1)
    if nbytes == floor or not step:
        return nbytes if nbytes == floor else 2 * floor
    return -(-nbytes // step) * step


def segment_bytes(block_bytes: int) -> int:
    """Bytes requested from the driver for a block that is not cached (`get_allocation_size`)."""
    if block_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-block_bytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


class CachingAllocator:
    """The allocator of one device.

    Args:
        limit_bytes: what the device has for it. Where a request would take it beyond, cached
            segments go back to the driver first. None: no limit.
        expandable_segments: as in PYTORCH_CUDA_ALLOC_CONF.
        power2_divisions: `roundup_power2_divisions`; 0 or 1 is off.

    >>> allocator = CachingAllocator()
    >>> weight = allocator.allocate(3 * 2**20)
    >>> allocator.allocated_bytes / 2**20, allocator.reserved_bytes / 2**20
    (3.0, 20.0)
    >>> allocator.free(weight)
    >>> allocator.allocated_bytes, allocator.reserved_bytes / 2**20
    (0, 20.0)
    """

    def __init__(
        self,
        limit_bytes: int | None = None,
        *,
        expandable_segments: bool = False,
        power2_divisions: int = 0,
    ) -> None:
        self._limit_bytes = limit_bytes
        self._is_expandable = expandable_segments
        self._power2_divisions = power2_divisions
        self._small = Pool(is_small=True, step_bytes=SMALL_SEGMENT_BYTES)
        self._large = Pool(is_small=False, step_bytes=LARGE_SEGMENT_BYTES)
        self._taken: dict[int, MemoryBlock] = {}
        self._next_address = LARGE_SEGMENT_BYTES
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0

    def allocate(self, nbytes: int) -> int:
        """Take memory; its address. 0 for no bytes, which take no memory.

        Raises:
            OutOfMemoryError: there is not enough under `limit_bytes`, nor in one piece.
        """
        if nbytes == 0:
            return 0
        size = rounded_bytes(nbytes, self._power2_divisions)
        pool = self._small if size <= SMALL_BYTES else self._large
        block = self._cached(pool, size) or self._fresh(pool, size)
        if block is None:
            self.release_cached()
            block = self._fresh(pool, size)
        if block is None:
            raise OutOfMemoryError(
                f"no room for {format_gib(nbytes)} on a device with"
                f" {format_gib(self._limit_bytes or 0)}",
                where=f"{format_gib(self.allocated_bytes)} are allocated,"
                f" {format_gib(self.reserved_bytes)} reserved",
                hints=["take a smaller microbatch, recompute, or shard over more devices"],
            )
        rest_bytes = block.size - size
        if rest_bytes >= MIN_BLOCK_BYTES and (
            pool.is_small or self._is_expandable or rest_bytes > SMALL_BYTES
        ):
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

    def release_cached(self) -> None:
        """Give segments back that nothing lies in (`torch.cuda.empty_cache`)."""
        for pool in (self._small, self._large):
            for _, address in tuple(pool.free):
                block = pool.blocks[address]
                if self._is_expandable:
                    self._unmap(block)
                elif not block.is_split:
                    pool.remove(block)
                    self.reserved_bytes -= block.size

    def _cached(self, pool: Pool, size: int) -> MemoryBlock | None:
        """The smallest free block that is large enough."""
        number = bisect_left(pool.free, (size, 0))
        if number == len(pool.free):
            return None
        block = pool.blocks[pool.free[number][1]]
        if self._is_expandable:
            # One that can grow counts as large as it can become.
            for _, address in pool.free[number + 1 :]:
                other = pool.blocks[address]
                if not block.is_split or other.expandable_bytes >= block.expandable_bytes:
                    break
                block = other
        pool.remove(block)
        return block

    def _fresh(self, pool: Pool, size: int) -> MemoryBlock | None:
        """A block of memory that was not reserved before; None where the limit forbids it."""
        if self._is_expandable:
            return self._expanded(pool, size)
        whole = segment_bytes(size)
        if not self._reserve(whole):
            return None
        block = MemoryBlock(pool, self._next_address, whole, is_mapped=True)
        self._next_address += whole
        return block

    def _reserve(self, nbytes: int) -> bool:
        reserved = self.reserved_bytes + nbytes
        if self._limit_bytes is not None and reserved > self._limit_bytes:
            return False
        self.reserved_bytes = reserved
        if reserved > self.peak_reserved_bytes:
            self.peak_reserved_bytes = reserved
        return True

    def _expanded(self, pool: Pool, size: int) -> MemoryBlock | None:
        """The lowest addresses that are free or unmapped for `size` bytes, with memory there."""
        room = self._room(pool, size)
        mapped = room if room.is_mapped else self._map(room, min(room.size, size))
        while mapped is not None and mapped.size < size:
            following = mapped.next
            assert following is not None
            mapped = self._map(following, min(following.size, size - mapped.size))
        if mapped is not None:
            pool.remove(mapped)
        return mapped

    def _room(self, pool: Pool, size: int) -> MemoryBlock:
        for address in pool.unmapped:
            block = pool.blocks[address]
            if block.previous is not None and block.previous.is_free:
                block = block.previous
            room: int = 0
            end: MemoryBlock | None = block
            while end is not None and end.is_free and room < size:
                room, end = room + end.size, end.next
            if room >= size:
                return block
        limit = self._limit_bytes
        space = ADDRESS_SPACE_BYTES if limit is None else limit + limit // 8
        space = -(-max(space, size) // pool.step_bytes) * pool.step_bytes
        segment = MemoryBlock(pool, self._next_address, space, is_mapped=False)
        self._next_address += -(-space // LARGE_SEGMENT_BYTES) * LARGE_SEGMENT_BYTES
        pool.add(segment)
        return segment

    def _map(self, block: MemoryBlock, nbytes: int) -> MemoryBlock | None:
        """Put memory behind the first bytes of an unmapped block, in whole steps; that and the
        free blocks beside it. None where the limit forbids it."""
        pool = block.pool
        nbytes = -(-nbytes // pool.step_bytes) * pool.step_bytes
        if not self._reserve(nbytes):
            return None
        pool.remove(block)
        if nbytes < block.size:
            pool.add(block.cut(nbytes))
        block.is_mapped = True
        return pool.add_merged(block)

    def _unmap(self, block: MemoryBlock) -> None:
        """Take the memory from the whole steps within a free block."""
        pool, step = block.pool, block.pool.step_bytes
        start = -(-block.address // step) * step
        end = (block.address + block.size) // step * step
        if end <= start:
            return
        pool.remove(block)
        if end < block.address + block.size:
            pool.add(block.cut(end - block.address))
        if start > block.address:
            middle = block.cut(start - block.address)
            pool.add(block)
            block = middle
        block.is_mapped = False
        self.reserved_bytes -= block.size
        pool.add_merged(block)
