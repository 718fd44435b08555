"""Times of training steps, noted as they run; nothing waits for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from engines.plan import Plan
from engines.runtime.world import World
from profiles.allocator.process_peak import peak_memory_bytes
from profiles.capture.batch.call import Batch
from profiles.capture.batch.tree import batch_tensors
from profiles.errors import BatchError
from profiles.model.profile import ModelProfile
from profiles.provenance import Timing
from profiles.timing.straggler_stats import Pace

# The first steps allocate, make optimizer states and communication buckets, and choose kernels.
WARM_UP_STEPS = 3
# The latest ones: enough for a median and both deciles, a few KiB in all.
MOST_STEPS = 200
# A batch of other lengths or rows than the plan's has another step time.
SAME_BATCH = 0.01

_Mark = float | torch.cuda.Event
_Lap = float | tuple[torch.cuda.Event, torch.cuda.Event]


class Steps:
    """Times of the steps that a plan was made for: full batches, as long as its sample.

    On a CPU by the clock, and by the processor time of the thread that trains: for the rest of the
    step it waited, for other ranks, their messages or a core. On CUDA by events in the stream,
    which are read only when they are over: a launched step is not yet a finished one.
    """

    def __init__(self, plan: Plan, profile: ModelProfile, world: World) -> None:
        rows = (plan.microbatch_size or 0) * plan.forwards
        self._batch_bytes = profile.batch_bytes.at(rows) if rows else 0.0
        self._device = world.device
        self.rank = world.rank
        self._laps: deque[_Lap] = deque(maxlen=MOST_STEPS)
        self._busy: deque[_Lap] = deque(maxlen=MOST_STEPS)
        self._updates: deque[_Lap] = deque(maxlen=MOST_STEPS)
        self._seen = 0
        self._peak_before = 0
        self._peak_after = 0
        self.pace: Pace | None = None
        """The ranks' own times, as they were compared last."""
        self.is_kept = False
        """True if a run was made of them."""

    @contextmanager
    def noted(self, batch: Batch) -> Iterator[None]:
        """Around one step; one that raises is not noted."""
        if not self._is_as_planned(batch):
            yield
            return
        if self._seen == 0:
            self._peak_before = peak_memory_bytes(self._device)
        computed_s, began = time.thread_time(), self._mark(time.perf_counter)
        yield
        ended, used_s = self._mark(time.perf_counter), time.thread_time() - computed_s
        self._seen += 1
        if self._seen > WARM_UP_STEPS:
            self._laps.append(_lap(began, ended))
            if self._device.type == "cpu":
                self._busy.append(used_s)
        elif self._seen == WARM_UP_STEPS:
            self._peak_after = peak_memory_bytes(self._device)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around the update of one step."""
        began = self._mark(time.thread_time)
        yield
        ended = self._mark(time.thread_time)
        if self._seen >= WARM_UP_STEPS:
            self._updates.append(_lap(began, ended))

    def _mark(self, clock: Callable[[], float]) -> _Mark:
        """An event on CUDA, else what `clock` says."""
        if self._device.type != "cuda":
            return clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _is_as_planned(self, batch: Batch) -> bool:
        try:
            nbytes = sum(tensor.nbytes for tensor in batch_tensors(batch))
        except BatchError:  # the step itself raises it, on all ranks
            return False
        wanted = self._batch_bytes
        return wanted > 0 and abs(nbytes - wanted) <= SAME_BATCH * wanted

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory of this rank in its first steps; None where it was higher before."""
        return self._peak_after if self._peak_after > self._peak_before else None

    def timing(self, *, fewest: int = 1) -> Timing | None:
        """Times of the finished steps after the warm-up, 10th to 90th percentile; None where they
        are fewer than `fewest`."""
        return _timing(self._laps, fewest=fewest)

    def busy_timing(self, *, fewest: int = 1) -> Timing | None:
        """The same without what the rank waited for; None on CUDA, where nobody can tell."""
        return _timing(self._busy, fewest=fewest)

    def update_timing(self, *, fewest: int = 1) -> Timing | None:
        """Times of the updates of these steps."""
        return _timing(self._updates, fewest=fewest)


def _timing(durations: Iterable[_Lap], *, fewest: int) -> Timing | None:
    known = list(filter(None, map(_seconds, durations)))
    return Timing.of(known) if len(known) >= fewest else None


def _lap(began: _Mark, ended: _Mark) -> _Lap:
    if isinstance(began, float) or isinstance(ended, float):
        assert isinstance(began, float)
        assert isinstance(ended, float)
        return ended - began
    return began, ended


def _seconds(lap: _Lap) -> float | None:
    """None while the device still runs it."""
    if isinstance(lap, float):
        return lap
    first, last = lap
    return first.elapsed_time(last) * 1e-3 if last.query() else None  # milliseconds
