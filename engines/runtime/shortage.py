"""Shortages of memory: a rank asked its allocator for more than there was.

torch has a type for those of accelerators; its CPU allocator raises a bare RuntimeError, Python a
MemoryError, and libraries of CUDA name a status.
"""

from __future__ import annotations

import re

import torch

from profiles.machine.host import resident_bytes
from profiles.record import Record
from profiles.units import format_gib, parse_bytes

_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMGT]iB)")


class Shortage(Record):
    """A rank that ran out of memory.

    Attributes:
        rank: its global number.
        held_bytes: memory in use when it failed: of the device by everything on it, on a CPU of
            this process.
        asked_bytes: of the allocation that failed; 0 where its error does not say.
    """

    rank: int
    held_bytes: float
    asked_bytes: float = 0.0

    @property
    def needed_bytes(self) -> float:
        """Memory that the step takes at least."""
        return self.held_bytes + self.asked_bytes

    def __str__(self) -> str:
        asked = f" and asked for {format_gib(self.asked_bytes)} more" if self.asked_bytes else ""
        return f"rank {self.rank} ran out of memory: {format_gib(self.held_bytes)} were held{asked}"


def is_shortage(error: BaseException) -> bool:
    """True if `error` is an allocation that failed."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def shortage_of(error: BaseException, *, rank: int, device: torch.device) -> Shortage | None:
    """The shortage that `error`, or what caused it, tells of; None if it is something else.

    Called before the memory of the step is freed: it reads what is held now.
    """
    cause: BaseException | None = error
    while cause is not None and not is_shortage(cause):
        cause = cause.__cause__
    if cause is None:
        return None
    asked = _ASKED.search(str(cause))
    amount, unit = asked.groups() if asked else ("0", "bytes")
    asked_bytes = float(amount) if unit == "bytes" else float(parse_bytes(f"{amount} {unit}"))
    return Shortage(rank=rank, held_bytes=_held_bytes(device), asked_bytes=asked_bytes)


def _held_bytes(device: torch.device) -> float:
    if device.type != "cuda":
        return float(resident_bytes())
    free, total = torch.cuda.mem_get_info(device)
    return float(total - free)
