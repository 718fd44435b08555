"""A model whose activations are its memory, and a limit on the memory of a process."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiles.allocator.process_peak import release_freed_memory
from tests.engines.cases import Case

MIB = 2**20
NO_LIMIT_MIB = 8192
"""A limit that is none: ranks without one retain no freed memory either, which a later test on the
same process would draw on."""
M_MMAP_THRESHOLD = -3  # mallopt(3)
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


@contextmanager
def memory_limit(extra_mib: float) -> Iterator[None]:
    """Inside, allocations fail that this process has not room for in `extra_mib` more than now."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)  # what is freed is given back at once
    release_freed_memory()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    lines = Path("/proc/self/status").read_text().splitlines()
    data = next(int(line.split()[1]) for line in lines if line.startswith("VmData:")) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (int(data + extra_mib * MIB), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
