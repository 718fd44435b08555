"""Timings of the device: matrix products by size, memory, and what launching costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil

import torch

from profiles.machine.bench.job import Job
from profiles.machine.bench.small_step import KERNELS, small_step
from profiles.machine.cluster import Device
from profiles.provenance import BENCH, Quantity, Source, Timing
from profiles.units import MIB

# Ranks that share a core take turns of a few milliseconds. A sample that is shorter than a turn is
# run in a turn of its own or stopped by another's, and a median never sees the stops; one of ten
# turns sees what a step will see. Measured, 4 ranks on 2 cores: of small operations that took
# 6.8 us each in the long run, medians of samples of a millisecond told 2.1 us, of these 6.2 us.
SAMPLE_S = 0.04
FEWEST_SAMPLES = 3
# Of all timings, one after the other: as often as each figure is measured.
ROUNDS = 3
# Edges of the products beside the large one: from what is all overhead to nearly as good.
CPU_EDGES, GPU_EDGES = (64, 128, 256, 512), (512, 1024, 2048, 4096)
# Beside a GPU: more than any cache, and little to lock into memory for every rank of a node.
HOST_COPY_BYTES = 256 * MIB
# A processor without units for 16 bits takes a second for the large product, and as long for a
# FLOP of a smaller one: 30 to 70 times as long as in fp32, measured.
EMULATED_EDGE, EMULATED = 512, 4
# Kernels of a graph: its own launch, 10 us, is then less than that of one of them.
REPLAYED = 20
# Larger than what glibc keeps for later: see `profiles.workload.new_memory`.
NEW_BYTES = 64 * MIB
# Bytes/s, where an allocator keeps large tensors too.
NO_LIMIT = 1e15
# A range that begins at 0 says nothing; a rate of 0 is not possible.
LARGEST_ERROR = 0.95


def matmul_rate(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.15) -> float:
    """FLOP/s of a large square matrix product, median of at least three samples."""
    edge = large_edge(device)
    return 2 * edge**3 / matmul_timing(device, dtype, edge, seconds=seconds).median_s


def matmul_timing(
    device: torch.device,
    dtype: torch.dtype,
    edge: int,
    *,
    seconds: float = 0.15,
    fewest: int = FEWEST_SAMPLES,
) -> Timing:
    """Seconds of a product of two `edge` x `edge` matrices; on a GPU without its launch.

    Args:
        fewest: samples, if they take longer than `seconds`.
    """
    left = random_matrix(edge, device, dtype)
    result = torch.empty_like(left)

    def product() -> None:
        torch.mm(left, left, out=result)

    if device.type != "cuda" or edge == large_edge(device):
        return _timing(product, device, seconds, fewest=fewest)
    return _timing(replayed(product), device, seconds, times=REPLAYED, fewest=fewest)


def replayed(work: Callable[[], object]) -> Callable[[], None]:
    """`work` `REPLAYED` times, launched at once as a CUDA graph.

    Where steps are bound by the device launches are hidden, while a kernel of 3 us in a loop of
    its own takes the 10 us of its launch.
    """
    work()  # libraries make their workspaces outside of the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's own thread asks after its events meanwhile, which a global capture forbids.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(REPLAYED):
            work()
    return graph.replay


def random_matrix(edge: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Normal values, `edge` x `edge`, by a generator of its own. A GPU that is bound by its power
    multiplies equal values faster than those of a training."""
    draw = torch.Generator(device).manual_seed(0)
    return torch.randn(edge, edge, device=device, dtype=dtype, generator=draw)


def large_edge(device: torch.device) -> int:
    """Of the product whose rate stands for all large ones."""
    return 8192 if device.type == "cuda" else 768


def copy_rate(device: torch.device, *, seconds: float = 0.15) -> float:
    """Bytes read and written per second by a copy that no cache holds, median of three or more."""
    return 2 * _copy_bytes(device) / copy_timing(device, seconds=seconds).median_s


def copy_timing(device: torch.device, *, seconds: float = 0.15) -> Timing:
    """Seconds of a copy that no cache holds."""
    origin = torch.zeros(_copy_bytes(device), device=device, dtype=torch.uint8)
    target = torch.zeros_like(origin)  # written once: no page is first touched in the timing
    return _timing(lambda: target.copy_(origin), device, seconds)


def host_copy_timing(device: torch.device, *, seconds: float = 0.15) -> Timing:
    """Seconds of the slower way of a copy between a GPU and page-locked main memory."""
    host = torch.zeros(HOST_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there = host.to(device)
    ways = (
        _timing(lambda: there.copy_(host, non_blocking=True), device, seconds / 2),
        _timing(lambda: host.copy_(there, non_blocking=True), device, seconds / 2),
    )
    return max(ways, key=lambda timing: timing.median_s)


def new_memory_s(*, seconds: float = 0.15) -> float:
    """Seconds that a processor takes to map `NEW_BYTES` that it writes, beyond writing them."""
    old, cpu = torch.empty(NEW_BYTES, dtype=torch.uint8), torch.device("cpu")
    again = _timing(lambda: old.fill_(1), cpu, seconds / 2)
    fresh = _timing(lambda: torch.empty_like(old).fill_(1), cpu, seconds / 2)
    return max(fresh.median_s - again.median_s, NEW_BYTES / NO_LIMIT)


def _copy_bytes(device: torch.device) -> int:
    return (1024 if device.type == "cuda" else 64) * MIB


def launch_time(device: torch.device, *, seconds: float = 0.15) -> float:
    """Seconds that the host takes for a kernel of a step, forward and backward."""
    return launch_timing(device, seconds=seconds).median_s / KERNELS


def launch_timing(device: torch.device, *, seconds: float = 0.15) -> Timing:
    """Seconds of the `KERNELS` kernels of a small step; a GPU is waited for after many steps."""
    return _timing(small_step(device), device, seconds)


def wait_for(device: torch.device) -> None:
    """Until a GPU has done what this thread asked of it; other streams go on."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _timing(
    work: Callable[[], object],
    device: torch.device,
    seconds: float,
    *,
    times: int = 1,
    fewest: int = FEWEST_SAMPLES,
) -> Timing:
    """Seconds of one of the `times` equal things that `work` does, run for about `seconds`:
    `fewest` samples at least, of `SAMPLE_S` or one run.

    The range is the 10th to the 90th percentile of the samples.
    """
    work()
    wait_for(device)
    begin = time.perf_counter()
    work()
    wait_for(device)
    first_s = time.perf_counter() - begin
    runs = ceil(SAMPLE_S / max(first_s, 1e-6))
    samples = [first_s / times] if runs == 1 else []
    end = begin + seconds if samples else time.perf_counter() + seconds
    while len(samples) < fewest or time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(runs):
            work()
        wait_for(device)
        samples.append((time.perf_counter() - begin) / (runs * times))
    return Timing.of(samples)


def _half(device: Device) -> torch.dtype:
    """The dtype of 16 bits that is timed: fp16 where a GPU has units for it and emulates bf16."""
    rates = device.flop_per_s
    half, plain = rates.get("float16"), rates.get("float32")
    has_units = half is not None and plain is not None and half.value > plain.value
    is_only = device.kind != "cpu" and "bfloat16" not in rates and has_units
    return torch.float16 if is_only else torch.bfloat16


def timed_device(job: Job, device: Device, *, budget_s: float) -> Device:
    """The device as the slowest rank sees it while all work.

    Every figure is measured in `ROUNDS` rounds, and its range holds them. The samples within a
    round differ by more where ranks share cores; a step, which is as long as many of them, does
    not. A GPU keeps its printed peaks, for utilisation is quoted against them, and gets the share
    that was reached; elsewhere the measured rate is the peak, and its share 1.
    """
    here, large = job.device, large_edge(job.device)
    half = _half(device)
    dtypes = [torch.float32, half]
    edges = GPU_EDGES if here.type == "cuda" else CPU_EDGES
    usual = half if here.type == "cuda" else torch.float32
    count = len(dtypes) + len(edges) + 3
    share_s = budget_s / count / ROUNDS

    def products(dtype: torch.dtype, edge: int) -> Timing:
        # Rounds are samples enough of a product that takes long.
        return matmul_timing(here, dtype, edge, seconds=share_s, fewest=1)

    large_of = dict.fromkeys(dtypes, large)
    if here.type == "cpu":
        plain_s, half_s = job.slowest([products(dtype, edges[-2]).median_s for dtype in dtypes])
        if half_s > EMULATED * plain_s:
            large_of[half] = min(large, EMULATED_EDGE)

    def medians_of_round() -> list[float]:
        timings = [products(dtype, edge) for dtype, edge in large_of.items()]
        timings += [copy_timing(here, seconds=share_s), launch_timing(here, seconds=share_s)]
        timings += [products(usual, edge) for edge in edges]
        seconds = [timing.median_s for timing in timings]
        if here.type == "cuda":
            seconds.append(host_copy_timing(here, seconds=share_s).median_s)
        else:
            seconds.append(new_memory_s(seconds=share_s))
        return job.slowest(seconds)

    job.barrier()
    rounds = [medians_of_round() for _ in range(ROUNDS)]
    figures = [Timing.of(figure) for figure in zip(*rounds, strict=True)]
    medians = [figure.median_s for figure in figures]
    errors = [figure.relative_error for figure in figures]

    rates = {
        str(dtype).removeprefix("torch."): measured(2 * edge**3 / medians[index], errors[index])
        for index, (dtype, edge) in enumerate(large_of.items())
    }
    best = rates[str(usual).removeprefix("torch.")].value
    efficiency = {
        edge: measured(min(1.0, 2 * edge**3 / median / best), error)
        for edge, median, error in zip(edges, medians[4:], errors[4:], strict=False)
    }
    update: dict[str, object] = {
        "memory_bandwidth_bytes_per_s": measured(2 * _copy_bytes(here) / medians[2], errors[2]),
        "launch_s": measured(medians[3] / KERNELS, errors[3]),
        "matmul_efficiency": {**efficiency, large: measured(1.0, 0.0)},
    }
    if here.type == "cuda":
        update["host_link_bytes_per_s"] = measured(HOST_COPY_BYTES / medians[-1], errors[-1])
    else:
        update["new_memory_bytes_per_s"] = measured(NEW_BYTES / medians[-1], errors[-1])
    name = str(half).removeprefix("torch.")
    if here.type == "cuda" and name in device.flop_per_s:
        rate = rates[name]
        share = rate.value / device.flop_per_s[name].value
        update["matmul_fraction"] = measured(share, rate.relative_error)
    else:
        update["flop_per_s"] = device.flop_per_s | rates
        update["matmul_fraction"] = Quantity(value=1.0, source=Source.MEASURED, origin=BENCH)
    return device.model_copy(update=update)


def measured(value: float, relative_error: float) -> Quantity:
    """A number that this bench timed."""
    return Quantity(
        value=rounded(value),
        source=Source.MEASURED,
        relative_error=rounded(min(relative_error, LARGEST_ERROR)),
        origin=BENCH,
    )


def rounded(value: float) -> float:
    """Four digits: more than a timing has, and a file that people read."""
    return float(f"{value:.4g}")
