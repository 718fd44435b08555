"""Peak memory of this process, which predictions are compared with."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
from pathlib import Path

import torch


def reset_peak_memory(device: torch.device) -> None:
    """Begin a new maximum from what is held now.

    On a CPU the kernel keeps the maximum; where it cannot be reset (not Linux, or not allowed) the
    maximum since the start of the process stays.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held since `reset_peak_memory`, everything included.

    CUDA: what the allocator reserved, plus what the device holds outside it (context, libraries,
    process group). CPU: the resident set of the process: interpreter, libraries, tensors.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        outside = total - free - torch.cuda.memory_reserved(device)
        return torch.cuda.max_memory_reserved(device) + max(0, outside)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def release_freed_memory() -> None:
    """Give memory that was freed back to the system, where the C library can (glibc).

    It keeps freed heaps for the next allocation: half a gigabyte after a proof on random weights.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
