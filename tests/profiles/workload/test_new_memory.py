"""Memory that is mapped anew, as the kernel counts its page faults."""

from __future__ import annotations

import platform
import resource
from pathlib import Path

import pytest
import torch

from profiles.machine.bench.device import NEW_BYTES, new_memory_s
from profiles.units import MIB
from profiles.workload.new_memory import MAPPED_BYTES, mapped

PAGE = resource.getpagesize()
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or (HUGE.exists() and "[always]" in HUGE.read_text()),
    reason="of glibc's allocator, and of small pages",
)


def faults(nbytes: int) -> int:
    """Page faults of making a tensor and writing it, once others were freed."""
    for size in (4 * MIB, 16 * MIB, nbytes):
        for _ in range(5):
            torch.empty(size, dtype=torch.uint8).fill_(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(nbytes, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_large_tensors_are_mapped_anew_and_small_ones_kept() -> None:
    assert faults(2 * MAPPED_BYTES) >= 0.9 * 2 * MAPPED_BYTES / PAGE
    assert faults(MIB) < 0.1 * MIB / PAGE
    assert (mapped(2 * MAPPED_BYTES), mapped(MIB)) == (2 * MAPPED_BYTES, 0)


@pytest.mark.timed
def test_first_writes_take_longer_than_others() -> None:
    """A page takes between a tenth of a microsecond and twenty."""
    assert 1e-7 < new_memory_s(seconds=0.3) / (NEW_BYTES / PAGE) < 2e-5
