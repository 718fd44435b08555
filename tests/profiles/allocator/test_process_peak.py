"""Freed memory goes back to the system."""

from __future__ import annotations

import sys

import pytest
import torch

from profiles.allocator.process_peak import release_freed_memory
from profiles.machine.host import resident_bytes

MIB = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc keeps, and gives back")
def test_a_freed_heap_is_given_back_to_the_system() -> None:
    # Blocks below glibc's threshold for its own mappings, so that they lie in the heap.
    blocks = [torch.ones(16 * 1024) for _ in range(4000)]  # 64 KiB each, 250 MiB
    before = resident_bytes()
    keep = blocks[-1]  # the heap's end stays in use: freeing alone gives nothing back
    del blocks
    release_freed_memory()
    assert resident_bytes() < before - 200 * MIB
    assert keep[0] == 1
