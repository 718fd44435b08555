"""Sequences worked out by hand from CUDACachingAllocator.cpp, and what always holds."""

from __future__ import annotations

import gc
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from profiles.allocator.caching_allocator import (
    CachingAllocator,
    rounded_bytes,
    segment_bytes,
)
from profiles.units import KIB, MIB


@pytest.mark.parametrize(
    ("nbytes", "block"),
    [(1, 512), (512, 512), (513, 1024), (MIB - 1, MIB), (MIB + 1, MIB + 512)],
)
def test_blocks_are_multiples_of_512_bytes(nbytes: int, block: int) -> None:
    assert rounded_bytes(nbytes) == block


@pytest.mark.parametrize(
    ("block", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
        (25 * MIB, 26 * MIB),
    ],
)
def test_segments_are_2_mib_20_mib_or_for_one_request(block: int, segment: int) -> None:
    assert segment_bytes(block) == segment


def test_small_requests_share_segments_of_2_mib() -> None:
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.allocate(512 * KIB)
    assert allocator.reserved_bytes == 2 * MIB
    allocator.allocate(1)
    assert allocator.reserved_bytes == 4 * MIB
    assert allocator.allocated_bytes == 2 * MIB + 512


def test_a_rest_of_at_most_1_mib_stays_with_a_large_block() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(19 * MIB))  # a segment of 20 MiB
    whole = allocator.allocate(19 * MIB)
    assert allocator.block_bytes(whole) == 20 * MIB
    allocator.free(whole)
    part = allocator.allocate(19 * MIB - 512)  # a rest of 1 MiB and 512 bytes is split off
    assert allocator.block_bytes(part) == 19 * MIB - 512
    assert allocator.reserved_bytes == 20 * MIB


def test_the_best_fit_is_the_smallest_block_that_is_large_enough() -> None:
    allocator = CachingAllocator()
    sizes = (40, 12, 24)
    first = {size: allocator.allocate(size * MIB) for size in sizes}
    for address in first.values():
        allocator.free(address)
    assert allocator.allocate(20 * MIB) == first[24]
    assert allocator.allocate(20 * MIB) == first[40]
    assert allocator.allocate(20 * MIB) == first[40] + 20 * MIB  # its rest
    assert allocator.reserved_bytes == sum(sizes) * MIB


def test_a_live_block_in_the_middle_forces_a_new_segment() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(100 * MIB))
    left, middle, right = (allocator.allocate(size * MIB) for size in (40, 20, 40))
    allocator.free(left)
    allocator.free(right)
    allocator.allocate(60 * MIB)  # 80 MiB are free, in two pieces
    assert allocator.reserved_bytes == 160 * MIB
    allocator.free(middle)
    allocator.allocate(100 * MIB)  # the neighbours became one
    assert allocator.reserved_bytes == 160 * MIB


def test_an_empty_request_reserves_nothing() -> None:
    allocator = CachingAllocator()
    address = allocator.allocate(0)
    allocator.free(address)
    assert (address, allocator.reserved_bytes) == (0, 0)


# A number takes so many bytes; None frees one of those that live, by the position beside it.
_STEPS = st.lists(
    st.tuples(
        st.one_of(st.none(), st.integers(1, 64 * MIB), st.integers(1, 2 * MIB)), st.integers(0, 99)
    ),
    max_size=120,
)


@settings(max_examples=200, deadline=None)
@given(steps=_STEPS)
def test_random_requests_never_overlap_and_are_accounted_for(
    steps: list[tuple[int | None, int]],
) -> None:
    def run() -> tuple[CachingAllocator, dict[int, int], list[tuple[int, int]]]:
        allocator = CachingAllocator()
        live: dict[int, int] = {}
        history = []
        for nbytes, position in steps:
            if nbytes is None:
                if live:
                    address = list(live)[position % len(live)]
                    allocator.free(address)
                    del live[address]
            else:
                live[allocator.allocate(nbytes)] = nbytes
            ends = sorted((address, address + allocator.block_bytes(address)) for address in live)
            assert all(end <= start for (_, end), (start, _) in pairwise(ends))
            assert all(allocator.block_bytes(a) >= n for a, n in live.items())
            assert allocator.allocated_bytes == sum(map(allocator.block_bytes, live))
            assert allocator.allocated_bytes <= allocator.reserved_bytes
            history.append((allocator.allocated_bytes, allocator.reserved_bytes))
        return allocator, live, history

    allocator, live, history = run()
    assert run()[2] == history  # the same again
    reserved = allocator.reserved_bytes
    assert [r for _, r in history] == sorted(r for _, r in history)
    assert allocator.peak_allocated_bytes == max((a for a, _ in history), default=0)
    for address in live:
        allocator.free(address)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, reserved)
    free = [b for pool in (allocator._small, allocator._large) for b in pool.blocks.values()]
    assert sum(block.size for block in free) == reserved
    assert all(block.previous is block.next is None for block in free)  # whole segments again


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("seed", range(5))
def test_it_reserves_what_cuda_reserves(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    gc.collect()  # else tensors of other tests may be freed on the way
    torch.cuda.empty_cache()
    before = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())  # of other tests
    simulated = CachingAllocator()
    live: list[tuple[int, torch.Tensor]] = []
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):  # no block of an earlier test is reused
        for _ in range(300):
            if live and torch.rand((), generator=draw) < 0.45:
                number = int(torch.randint(len(live), (), generator=draw))
                simulated.free(live.pop(number)[0])
            else:
                nbytes = int(2 ** (8 + 18 * torch.rand((), generator=draw).item()))
                address = simulated.allocate(nbytes)
                live.append((address, torch.empty(nbytes, dtype=torch.uint8, device="cuda")))
            assert torch.cuda.memory_allocated() - before[0] == simulated.allocated_bytes
            assert torch.cuda.memory_reserved() - before[1] == simulated.reserved_bytes
        live.clear()
