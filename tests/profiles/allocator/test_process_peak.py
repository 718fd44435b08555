"""Freed memory goes back to the system; on a GPU other processes' memory is theirs."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from profiles.allocator import process_peak
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


class DriverError(Exception):
    """As NVML's are: of the library's own."""


def driver(**processes: int | None) -> ModuleType:
    """NVML that lists these processes, by their ids, and what each holds."""
    library = ModuleType("pynvml")
    listed = [SimpleNamespace(pid=int(p[1:]), usedGpuMemory=n) for p, n in processes.items()]
    library.__dict__.update(
        NVMLError=DriverError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: listed,
    )
    return library


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    properties = SimpleNamespace(uuid="0-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return torch.device("cuda", 0)


def others(gpu: torch.device, library: ModuleType) -> int:
    return process_peak._bytes_of_others(gpu, library)


def test_other_processes_are_told_from_this_one(gpu: torch.device) -> None:
    own = f"p{os.getpid()}"
    assert others(gpu, driver(**{own: 10, "p1": 3, "p2": 4})) == 7
    assert others(gpu, driver(**{own: 10, "p1": None})) == 0


def test_where_the_driver_lists_ids_of_another_namespace_all_is_taken_as_ones_own(
    gpu: torch.device,
) -> None:
    assert others(gpu, driver(p1=3, p2=4)) == 0


def test_a_driver_that_does_not_answer_says_nothing(gpu: torch.device) -> None:
    def raises(*_: object) -> None:
        raise DriverError

    silent, broken = driver(), driver()
    silent.__dict__["nvmlInit"] = raises
    broken.__dict__["nvmlDeviceGetHandleByUUID"] = raises
    assert others(gpu, silent) == others(gpu, broken) == 0
