"""Peak memory of this process, which predictions are compared with."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

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
    process group); other processes are left out where the driver tells them from this one
    (`nvidia-ml-py`). CPU: the resident set of the process: interpreter, libraries, tensors.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        outside = total - free - torch.cuda.memory_reserved(device) - _bytes_of_others(device)
        return torch.cuda.max_memory_reserved(device) + max(0, outside)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _bytes_of_others(device: torch.device, library: ModuleType | None = None) -> int:
    """Device memory of other processes; 0 where the driver does not list this one by its own id,
    as from inside some containers."""
    try:
        nvml = library or import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # not installed, or no driver that answers: errors of a class of its own
        return 0
    try:
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByUUID(uuid))
    except (nvml.NVMLError, AttributeError):
        return 0
    finally:
        nvml.nvmlShutdown()
    if os.getpid() not in (process.pid for process in processes):
        return 0
    return sum(p.usedGpuMemory or 0 for p in processes if p.pid != os.getpid())


def release_freed_memory() -> None:
    """Give memory that was freed back to the system, where the C library can (glibc).

    It keeps freed heaps for the next allocation: half a gigabyte after a proof on random weights.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
