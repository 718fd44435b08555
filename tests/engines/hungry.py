"""A model whose activations are its memory, and a limit on the memory of a process."""

from __future__ import annotations

import ctypes
import gc
import resource
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from profiles.allocator.process_peak import release_freed_memory
from tests.engines.cases import Case

MIB = 2**20
NO_LIMIT_MIB = 8192
M_MMAP_THRESHOLD = -3  # mallopt(3)
LIBC = ctypes.CDLL(None)


class _HeapCounts(ctypes.Structure):
    """struct mallinfo2 of glibc: `arena` is the first of its ten counts."""

    _fields_ = (("arena", ctypes.c_size_t), ("others", ctypes.c_size_t * 9))


LIBC.malloc.restype = ctypes.c_void_p
LIBC.malloc.argtypes = [ctypes.c_size_t]
LIBC.free.argtypes = [ctypes.c_void_p]
LIBC.mallinfo2.restype = _HeapCounts

COPIES = 2**14
"""Of a row's 16 values: 1 MiB."""


class Wide(nn.Module):
    """Saves 1 MiB a row for its backward, and takes up to three more for a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.tanh(self.layer(x).repeat(1, COPIES)).view(-1, COPIES, 16).mean(1)
        return out


class Hungry(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Wide() for _ in range(4))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def hungry_batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    inputs = torch.randn(rows, 16, generator=generator)
    return inputs, torch.randint(5, (rows,), generator=generator)


HUNGRY = Case(Hungry, hungry_batch, F.cross_entropy)
"""A step of 16 rows saves 64 MiB, one of 8 rows half of that."""


def build() -> tuple[nn.Module, tuple[Tensor, Tensor], object]:
    """The factory that commands name: `tests.engines.hungry:build`."""
    return HUNGRY.build(), hungry_batch(2), HUNGRY.loss_fn


class TensorLimit(TorchDispatchMode):
    """Fails an operation as torch's CPU allocator does, if the tensors made inside take more than
    `limit_mib`.

    Exact, whatever the process holds besides, and at any load. Of the process: `memory_limit`.

    Attributes:
        peak_mib: largest sum so far.
    """

    def __init__(self, limit_mib: float) -> None:
        super().__init__()
        self.peak_mib = 0.0
        self._limit_mib = limit_mib
        self._live: dict[int, tuple[float, weakref.ref[Any]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        asked = sum(self._note(one) for one in tree_leaves(out) if isinstance(one, Tensor))
        live = sum(mib for mib, _ in self._live.values())
        self.peak_mib = max(self.peak_mib, live)
        if live > self._limit_mib:
            raise RuntimeError(  # as c10/core/impl/alloc_cpu.cpp does
                "[enforce fail at alloc_cpu.cpp:128] err == 0. DefaultCPUAllocator: can't allocate"
                f" memory: you tried to allocate {int(asked * MIB)} bytes. Error code 12"
            )
        return out

    def _note(self, tensor: Tensor) -> float:
        """Count the storage of `tensor` until it is freed; its MiB, 0 if it was known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return 0.0
        gone = weakref.ref(storage, lambda _: self._live.pop(key))
        self._live[key] = storage.nbytes() / MIB, gone
        return self._live[key][0]


@contextmanager
def memory_limit(extra_mib: float) -> Iterator[None]:
    """Inside, allocations fail that this process has not room for in `extra_mib` more than now."""
    LIBC.mallopt(M_MMAP_THRESHOLD, MIB)  # what is freed is given back at once
    gc.collect()  # garbage that was collected later would add to the room
    release_freed_memory()
    free_chunks = _take_free_chunks()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    lines = Path("/proc/self/status").read_text().splitlines()
    data = next(int(line.split()[1]) for line in lines if line.startswith("VmData:")) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (int(data + extra_mib * MIB), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        for chunk in free_chunks:
            LIBC.free(chunk)


def _take_free_chunks() -> list[ctypes.c_void_p]:
    """Allocate what earlier work left free in the heap: large tensors would be made in it, and a
    limit on the process would not see them. See mallinfo2 in mallinfo(3)."""
    chunks: list[ctypes.c_void_p] = []
    before = _heap_bytes()
    while _heap_bytes() == before:
        chunks.append(ctypes.c_void_p(LIBC.malloc(MIB - 4096)))  # below the threshold
    return chunks


def _heap_bytes() -> int:
    return int(LIBC.mallinfo2().arena)
