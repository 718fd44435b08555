"""Memory that a process is given anew: its pages are mapped as they are first written.

glibc keeps freed memory for later, but for large tensors: what is as large as `MAPPED_BYTES` is
mapped by each allocation and unmapped when it is freed (mallopt(3), M_MMAP_THRESHOLD: it grows with
what is freed, up to this). A page fault zeroes 4 KiB and takes about a microsecond; the bench times
it (`new_memory` of `advise probe --bench`, beside `memory_bandwidth`). Smaller tensors are mapped
anew only where much of the heap's top is free, which is not known here.
"""

from __future__ import annotations

from profiles.units import MIB

MAPPED_BYTES = 32 * MIB


def mapped(nbytes: float) -> float:
    """Bytes of a tensor that are mapped anew whenever it is made.

    >>> mapped(64 * MIB) == 64 * MIB, mapped(16 * MIB)
    (True, 0.0)
    """
    return nbytes if nbytes >= MAPPED_BYTES else 0.0
