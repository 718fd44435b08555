"""Notes of how long steps take: the steady ones, of the batches that the plan is for."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from engines.plan import Plan
from engines.runtime import steps as module
from engines.runtime.steps import MOST_STEPS, WARM_UP_STEPS, Steps
from engines.runtime.world import World
from profiles.model.affine import Affine
from tests.factories import chain

BATCH = torch.zeros(4, 8)  # 128 bytes


def notes() -> Steps:
    profile = chain().model_copy(update={"batch_bytes": Affine(per_sample=32.0)})
    world = World(rank=0, size=1, device=torch.device("cpu"), timeout_s=1.0)
    return Steps(Plan.parse("microbatch_size=2 accumulation=2"), profile, world)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Steps take the seconds that are in the list, in order."""
    seconds: list[float] = []
    ticks = iter(())

    def tick() -> float:
        nonlocal ticks
        try:
            return next(ticks)
        except StopIteration:
            ticks = iter((seconds.pop(0),))
            return 0.0

    monkeypatch.setattr(module.time, "perf_counter", tick)
    return seconds


def take(actual: Steps, count: int, batch: object = BATCH) -> None:
    for _ in range(count):
        with actual.noted(batch):  # type: ignore[arg-type]
            pass


def test_warm_up_steps_are_left_out_and_the_range_is_the_10th_to_90th_percentile(
    clock: list[float],
) -> None:
    clock += [9.0] * WARM_UP_STEPS + [float(second) for second in range(1, 12)]
    actual = notes()
    take(actual, WARM_UP_STEPS)
    assert actual.timing() is None
    take(actual, 11)
    timing = actual.timing()
    assert timing is not None
    assert (timing.median_s, timing.low_s, timing.high_s, timing.repeats) == (6, 2, 10, 11)
    assert actual.timing(fewest=12) is None


@pytest.mark.parametrize(
    "batch",
    [torch.zeros(3, 8), torch.zeros(4, 6), torch.zeros(4, 8).double(), "no batch"],
    ids=["fewer rows", "shorter", "wider numbers", "no batch"],
)
def test_batches_of_another_size_are_not_timed(batch: object, clock: list[float]) -> None:
    clock += [1.0] * 20
    actual = notes()
    take(actual, 10, batch)
    assert actual.timing() is None


def test_waiting_is_not_counted_as_busy_time() -> None:
    actual = notes()
    for _ in range(WARM_UP_STEPS + 3):
        with actual.noted(BATCH):
            ends = time.thread_time() + 0.002
            while time.thread_time() < ends:
                pass
            time.sleep(0.02)
    step, busy = actual.timing(), actual.busy_timing()
    assert step is not None
    assert busy is not None
    assert step.low_s >= 0.02
    assert 0.002 <= busy.median_s < 0.01
    assert actual.busy_timing(fewest=4) is None


def test_a_step_that_raises_is_not_timed(clock: list[float]) -> None:
    clock += [1.0] * 20
    actual = notes()
    take(actual, WARM_UP_STEPS)
    for _ in range(3):
        with pytest.raises(ValueError, match="of the step"), actual.noted(BATCH):
            raise ValueError("of the step")
    assert actual.timing() is None


def test_the_number_of_stored_timings_is_bounded(clock: list[float]) -> None:
    clock += [1.0] * (2 * MOST_STEPS)
    actual = notes()
    take(actual, 2 * MOST_STEPS)
    timing = actual.timing()
    assert timing is not None
    assert timing.repeats == MOST_STEPS


@pytest.mark.parametrize(("after", "expected"), [(700, 700), (500, None)])
def test_the_peak_includes_the_warm_up_steps(
    monkeypatch: pytest.MonkeyPatch, after: int, expected: int | None
) -> None:
    peaks = itertools.chain([500], itertools.repeat(after))
    monkeypatch.setattr(module, "peak_memory_bytes", lambda device: next(peaks))
    actual = notes()
    take(actual, WARM_UP_STEPS + 2)
    assert actual.peak_bytes == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_a_step_lasts_as_long_as_the_device_works() -> None:
    device = torch.device("cuda")
    profile = chain().model_copy(update={"batch_bytes": Affine(per_sample=32.0)})
    world = World(rank=0, size=1, device=device, timeout_s=1.0)
    actual = Steps(Plan.parse("microbatch_size=2 accumulation=2"), profile, world)
    matrix = torch.rand(8192, 8192, device=device)
    for _ in range(WARM_UP_STEPS):
        with actual.noted(BATCH):
            matrix @ matrix
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        with actual.noted(BATCH):
            matrix @ matrix
    torch.cuda.synchronize()
    wall_s = time.perf_counter() - began
    timing = actual.timing()
    assert timing is not None
    assert timing.median_s == pytest.approx(wall_s / 20, rel=0.2)
