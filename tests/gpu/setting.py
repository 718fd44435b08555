"""The setting of a run: device, machines as predictions know them, and small or full size.

All that asks a device about its memory or its clock is here, for CUDA and for the CPU on which the
same cases are tried at small size.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor

from profiles.machine import catalogue
from profiles.machine.bench.device import REPLAYED, replayed
from profiles.machine.cluster import ClusterProfile
from profiles.machine.probe import probe
from tests.contract.watch import LiveBytes

WARM_UP = 3
FEWEST, MOST = 3, 20
SAMPLE_S = 5e-3  # of short work in a row, so that an event's resolution (0.5 us) does not count


class LeftOutError(Exception):
    """A case needs something that is not here; the message says what."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Device and machines of a case.

    Attributes:
        sheet: this machine by its data sheet alone: its launches are not timed.
        bench: the same as timed; None before that.
        is_small: on the CPU, to try the logic.
    """

    device: torch.device
    sheet: ClusterProfile
    bench: ClusterProfile | None = None
    is_small: bool = False

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Of training, on such devices."""
        return torch.bfloat16 if self.is_cuda else torch.float32

    def machines(self) -> tuple[ClusterProfile, ClusterProfile | None]:
        """The two that predictions are made from."""
        return self.sheet, self.bench

    def benched(self, cluster: ClusterProfile) -> ClusterProfile | None:
        """`cluster` of devices as this one was timed."""
        if self.bench is None:
            return None
        own = cluster.device
        device = self.bench.device.model_copy(
            update={"memory_bytes": own.memory_bytes, "context_bytes": own.context_bytes}
        )
        return cluster.model_copy(update={"device": device})

    def with_bench(self, bench: ClusterProfile) -> Setting:
        return replace(self, bench=bench)

    def with_launches(self, launch_s: float | None) -> Setting:
        """The bench's device with a host that takes `launch_s` for a kernel; None: its own."""
        if launch_s is None or self.bench is None:
            return self
        device = self.bench.device
        launch = device.launch_s.model_copy(update={"value": launch_s})
        device = device.model_copy(update={"launch_s": launch})
        return self.with_bench(self.bench.model_copy(update={"device": device}))

    def synchronize(self) -> None:
        """Wait for all that was asked of the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Give back what the last case held, so that the next one begins with an empty cache."""
        if self.is_cuda:
            gc.collect()
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def seconds(self, work: Callable[[], object], *, at_most_s: float = 1.0) -> float:
        """Median seconds of `work`; by events of the current stream on CUDA.

        At least three samples, about `at_most_s` in all.
        """
        work()
        self.synchronize()
        began = time.perf_counter()
        work()
        self.synchronize()
        once_s = max(time.perf_counter() - began, 1e-7)
        runs = 1 if self.is_small else ceil(SAMPLE_S / once_s)
        most = FEWEST if self.is_small else MOST
        samples = min(most, max(FEWEST, int(at_most_s / (runs * once_s))))
        if not self.is_cuda:
            return statistics.median(_clocked(work, runs) for _ in range(samples))
        pairs = []
        for _ in range(samples):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(runs):
                work()
            last.record()
            pairs.append((first, last))
        self.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in pairs) * 1e-3 / runs

    def kernel_seconds(self, work: Callable[[], object], *, at_most_s: float = 1.0) -> float:
        """As `seconds`, without launches on CUDA: many of `work`, launched as one graph."""
        if not self.is_cuda:
            return self.seconds(work, at_most_s=at_most_s)
        return self.seconds(replayed(work), at_most_s=at_most_s) / REPLAYED


def _clocked(work: Callable[[], object], runs: int) -> float:
    began = time.perf_counter()
    for _ in range(runs):
        work()
    return (time.perf_counter() - began) / runs


def setting_here(*, bench: ClusterProfile | None = None) -> Setting:
    """On the first CUDA device, else small and on the CPU.

    fp32 is fp32 from now on: TF32 is off for products and convolutions, as predictions take it.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if not torch.cuda.is_available():
        return Setting(torch.device("cpu"), probe(ranks=1), bench, is_small=True)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    sheet = probe(ranks=1)
    as_published = sheet.device.model_copy(update={"launch_s": catalogue.LAUNCH})
    return Setting(device, sheet.model_copy(update={"device": as_published}), bench)


class DeviceMemory:
    """Bytes of tensors on a device: now, and at most since `begin`.

    On CUDA the caching allocator's count; on a CPU the storages that operations make.
    """

    def __init__(self, setting: Setting, before: Iterable[Tensor] = ()) -> None:
        self._setting = setting
        self._live = None if setting.is_cuda else LiveBytes(before)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, the maximum is kept, from what is held at the beginning."""
        device = self._setting.device
        if self._live is None:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            yield
            torch.cuda.synchronize(device)
            return
        self._live.peak_bytes = self._live.now()
        with self._live:
            yield

    def now(self) -> int:
        if self._live is None:
            return torch.cuda.memory_allocated(self._setting.device)
        return self._live.now()

    def peak(self) -> int:
        if self._live is None:
            return torch.cuda.max_memory_allocated(self._setting.device)
        return self._live.peak_bytes

    def reserved_peak(self) -> int | None:
        """Of the caching allocator; None where there is none."""
        if self._live is None:
            return torch.cuda.max_memory_reserved(self._setting.device)
        return None
