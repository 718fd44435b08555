"""Timings of this job: matrix products, memory, and collectives over message sizes, as a profile.

Run on every rank of an initialised process group. What is timed is what training will meet: all
ranks work at the same moment, so CPU ranks share their cores and collectives of different nodes
share the network.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from profiles.cluster import ClusterProfile, Collective, Device, Link, LinkFit
from profiles.errors import InputError, RankError
from profiles.fit import fit
from profiles.provenance import Quantity, Source, Timing
from profiles.torch_compat import all_gather_single, reduce_scatter_single
from profiles.units import KIB, MIB

TIMED = (
    Collective.ALL_REDUCE,
    Collective.ALL_GATHER,
    Collective.REDUCE_SCATTER,
    Collective.SEND_RECV,
)
SMALLEST_BYTES = KIB
# Four-fold steps: two a decade are enough for a line through latency and bandwidth.
STEP = 4
# Timed whatever the budget: below it a slow machine's jitter hides the bandwidth.
ALWAYS_BYTES = 256 * KIB
# A median needs three; more only where the budget allows.
FEWEST_ROUNDS, MOST_ROUNDS = 3, 25
# After a barrier the ranks wake up to a scheduler's tick apart; calls in a row make that small
# beside them. (bytes up to which, calls)
REPEATS = ((128 * KIB, 16), (2 * MIB, 4), (math.inf, 1))
# Time that a rank may be late before the others give up, beyond the budget.
PATIENCE_S = 60.0
MATMUL_SHARE = 0.25
LAUNCHES = 200  # small operations timed in a row: a clock reads no finer
# A range that begins at 0 says nothing; a bandwidth of 0 is not possible.
LARGEST_ERROR = 0.95


def bench(
    cluster: ClusterProfile, *, budget_s: float = 8.0, max_bytes: int = 64 * MIB
) -> ClusterProfile:
    """`cluster` with this job's measured speeds in place of its own; the same on every rank.

    Collectives run over all ranks of a node (`intra`), and over one rank of every node, in all
    such groups at once (`inter`: figures are for the whole node). A fit's latency is that of the
    tier's full group: `devices_per_node` or `num_nodes` ranks. The link's own bandwidth is the
    middle of the collectives', its range holds them all; its latency is that of a send.

    Args:
        cluster: of this job, from `probe`; rank 0's is used.
        budget_s: wall time to spend, about; large messages are left out where it is short.
        max_bytes: largest message; 256 KiB at least.

    Raises:
        InputError: no process group, or a cluster of another size than the job.
        RankError: a rank did not answer in time, or broke off.
    """
    if not dist.is_initialized():
        raise InputError(
            "the bench needs a process group",
            hints=["start it with `torchrun --nproc-per-node N`, and init_process_group first"],
        )
    world = dist.get_world_size()
    if cluster.world_size != world:
        raise InputError(
            f"the cluster has {cluster.world_size} devices, this job {world} ranks",
            where=f"cluster `{cluster.name}`",
        )
    started = time.perf_counter()
    try:
        return _bench(cluster, budget_s=budget_s, max_bytes=max_bytes)
    except RuntimeError as error:  # torch's own: a timeout, a closed connection, no memory
        waited = time.perf_counter() - started
        raise RankError(
            f"the bench broke off after {waited:.0f} s: {str(error).splitlines()[0]}",
            where=f"rank {dist.get_rank()} of {world}",
            hints=["a rank that died or never came makes the others wait; see its own output"],
        ) from error


def matmul_rate(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.15) -> float:
    """FLOP/s of a large square matrix product, median of at least three."""
    return 2 * _matmul_size(device) ** 3 / matmul_timing(device, dtype, seconds=seconds).median_s


def matmul_timing(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.15) -> Timing:
    """Seconds of a large square matrix product."""
    size = _matmul_size(device)
    left = torch.ones(size, size, device=device, dtype=dtype)
    result = torch.empty_like(left)
    return _timing(lambda: torch.mm(left, left, out=result), device, seconds)


def _matmul_size(device: torch.device) -> int:
    return 8192 if device.type == "cuda" else 768


def copy_rate(device: torch.device, *, seconds: float = 0.15) -> float:
    """Bytes read and written per second by a copy that no cache holds, median of three or more."""
    return 2 * _copy_bytes(device) / copy_timing(device, seconds=seconds).median_s


def copy_timing(device: torch.device, *, seconds: float = 0.15) -> Timing:
    """Seconds of a copy that no cache holds."""
    origin = torch.zeros(_copy_bytes(device), device=device, dtype=torch.uint8)
    target = torch.zeros_like(origin)  # written once: no page is first touched in the timing
    return _timing(lambda: target.copy_(origin), device, seconds)


def _copy_bytes(device: torch.device) -> int:
    return (1024 if device.type == "cuda" else 64) * MIB


def launch_time(device: torch.device, *, seconds: float = 0.05) -> float:
    """Seconds of one small operation among many: what launching costs."""
    return launch_timing(device, seconds=seconds).median_s / LAUNCHES


def launch_timing(device: torch.device, *, seconds: float = 0.05) -> Timing:
    """Seconds of `LAUNCHES` small operations in a row."""
    tensor = torch.zeros(16, device=device)

    def many() -> None:
        for _ in range(LAUNCHES):
            tensor.add_(1)

    return _timing(many, device, seconds)


def _bench(cluster: ClusterProfile, *, budget_s: float, max_bytes: int) -> ClusterProfile:
    patience = timedelta(seconds=budget_s + PATIENCE_S)
    on_gpu = dist.get_backend() == "nccl"
    here = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    everyone = dist.new_group(timeout=patience)
    try:
        cluster = _same_everywhere(cluster, everyone, here)
        per_node, nodes = cluster.devices_per_node, cluster.num_nodes
        tiers = sum((per_node > 1, nodes > 1))
        share = budget_s * (1 - MATMUL_SHARE) / max(tiers, 1)
        update: dict[str, object] = {
            "device": _timed_device(cluster.device, everyone, here, budget_s * MATMUL_SHARE)
        }
        if per_node > 1:
            groups = [list(range(n * per_node, (n + 1) * per_node)) for n in range(nodes)]
            fits = _tier_fits(groups, everyone, here, share, max_bytes, patience)
            update["intra"] = _link(cluster.intra, fits, "links in the node", scale=1)
        if nodes > 1:
            groups = [list(range(r, per_node * nodes, per_node)) for r in range(per_node)]
            fits = _tier_fits(groups, everyone, here, share, max_bytes, patience)
            update["inter"] = _link(cluster.inter, fits, "links between nodes", scale=per_node)
        return _same_everywhere(cluster.model_copy(update=update), everyone, here)
    finally:
        dist.destroy_process_group(everyone)


def _timing(work: Callable[[], object], device: torch.device, seconds: float) -> Timing:
    """Seconds of `work`, run for about `seconds` after one warm-up, three times at least.

    The range is the 10th to the 90th percentile.
    """
    work()
    _wait(device)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - begin)
    times.sort()
    tenth = len(times) // 10
    return Timing(
        median_s=statistics.median(times),
        low_s=times[tenth],
        high_s=times[-1 - tenth],
        repeats=len(times),
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(values: Sequence[float], group: dist.ProcessGroup, here: torch.device) -> list[float]:
    """Element-wise maximum over all ranks: the same on every rank, so they decide alike."""
    tensor = torch.tensor(values, dtype=torch.float64, device=here)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return [float(value) for value in tensor.tolist()]


def _same_everywhere(
    cluster: ClusterProfile, group: dist.ProcessGroup, here: torch.device
) -> ClusterProfile:
    """Rank 0's profile on every rank, sent as JSON bytes."""
    payload = torch.tensor(list(cluster.to_json().encode()), dtype=torch.uint8, device=here)
    size = torch.tensor([payload.numel()], device=here)
    dist.broadcast(size, src=0, group=group)
    if dist.get_rank() != 0:
        payload = torch.empty(int(size.item()), dtype=torch.uint8, device=here)
    dist.broadcast(payload, src=0, group=group)
    return ClusterProfile.from_json(bytes(payload.tolist()).decode(), where="rank 0")


def _timed_device(
    device: Device, group: dist.ProcessGroup, here: torch.device, seconds: float
) -> Device:
    """The device as the slowest rank sees it while all work.

    The range holds the ranks' medians and the 10th to 90th percentile within each rank. A GPU keeps
    its printed peaks, for utilisation is quoted against them, and gets the share that was reached;
    elsewhere the measured rate is the peak, and its share 1.
    """
    dtypes = [torch.float32, torch.bfloat16]
    dist.barrier(group=group)
    slices = seconds / 8
    timings = [matmul_timing(here, dtype, seconds=2 * slices) for dtype in dtypes]
    timings += [copy_timing(here, seconds=2 * slices), launch_timing(here, seconds=slices)]
    median = _slowest([timing.median_s for timing in timings], group, here)
    high = _slowest([timing.high_s for timing in timings], group, here)
    low = [-value for value in _slowest([-timing.low_s for timing in timings], group, here)]
    errors = [(worst - best) / (worst + best) for worst, best in zip(high, low, strict=True)]
    flop, moved = 2 * _matmul_size(here) ** 3, 2 * _copy_bytes(here)
    rates = {
        str(dtype).removeprefix("torch."): _measured(flop / median[index], errors[index])
        for index, dtype in enumerate(dtypes)
    }
    update: dict[str, object] = {
        "memory_bandwidth_bytes_per_s": _measured(moved / median[2], errors[2]),
        "launch_s": _measured(median[3] / LAUNCHES, errors[3]),
    }
    if here.type == "cuda" and "bfloat16" in device.flop_per_s:
        rate = rates["bfloat16"]
        share = rate.value / (device.flop_per_s["bfloat16"].value)
        update["matmul_fraction"] = _measured(share, rate.relative_error)
    else:
        update["flop_per_s"] = device.flop_per_s | rates
        update["matmul_fraction"] = Quantity(value=1.0, source=Source.MEASURED)
    return device.model_copy(update=update)


def _measured(value: float, relative_error: float) -> Quantity:
    return Quantity(
        value=value,
        source=Source.MEASURED,
        relative_error=min(relative_error, LARGEST_ERROR),
        origin="bench",
    )


def _tier_fits(
    groups: Sequence[list[int]],
    everyone: dist.ProcessGroup,
    here: torch.device,
    budget_s: float,
    max_bytes: int,
    patience: timedelta,
) -> dict[Collective, LinkFit]:
    """Time the collectives in this rank's group, all groups at once, and fit each."""
    mine: dist.ProcessGroup | None = None
    for ranks in groups:  # every rank takes part in making every group
        group = dist.new_group(ranks, timeout=patience)
        if dist.get_rank() in ranks:
            mine = group
    assert mine is not None
    size = len(groups[0])
    try:
        samples = _sample(mine, size, everyone, here, budget_s, max_bytes)
    finally:
        dist.destroy_process_group(mine)
    return {
        collective: fit(
            [
                (collective.bus_factor(size) * count, statistics.median(times))
                for count, times in by_size.items()
            ]
        )
        for collective, by_size in samples.items()
    }


def _sample(
    group: dist.ProcessGroup,
    size: int,
    everyone: dist.ProcessGroup,
    here: torch.device,
    budget_s: float,
    max_bytes: int,
) -> Mapping[Collective, dict[int, list[float]]]:
    """Seconds by collective and message size, the slowest rank's, in rounds over all of them.

    Rounds interleave sizes and collectives, so that a disturbance of a second touches one sample of
    many. The first round climbs and stops before a size that the budget would not see three times.
    """
    samples: dict[Collective, dict[int, list[float]]] = {kind: {} for kind in TIMED}
    largest = max(max_bytes, ALWAYS_BYTES)
    buffer = torch.zeros(largest // 4, dtype=torch.float32, device=here)
    for kind in TIMED:  # connections are made on first use
        _time_once(kind, buffer, SMALLEST_BYTES, group, size, everyone, here, time.perf_counter())
    sizes: list[int] = []
    begin, elapsed = time.perf_counter(), 0.0
    count = SMALLEST_BYTES
    while count <= largest:
        before = elapsed
        for kind in TIMED:
            seconds, elapsed = _time_once(kind, buffer, count, group, size, everyone, here, begin)
            samples[kind][count] = [seconds]
        sizes.append(count)
        all_again = (FEWEST_ROUNDS - 1) * elapsed
        next_size = FEWEST_ROUNDS * STEP * (elapsed - before)
        if count >= ALWAYS_BYTES and elapsed + all_again + next_size > budget_s:
            break
        count *= STEP
    for done in range(1, MOST_ROUNDS):
        if done >= FEWEST_ROUNDS and elapsed * (done + 1) / done > budget_s:
            break
        for count in sizes:
            for kind in TIMED:
                seconds, elapsed = _time_once(
                    kind, buffer, count, group, size, everyone, here, begin
                )
                samples[kind][count].append(seconds)
    return samples


def _time_once(
    kind: Collective,
    buffer: torch.Tensor,
    count: int,
    group: dist.ProcessGroup,
    size: int,
    everyone: dist.ProcessGroup,
    here: torch.device,
    begin: float,
) -> tuple[float, float]:
    """Seconds of one call after a barrier, and seconds since `begin`: both the slowest rank's."""
    work = _call(kind, buffer, count, group, size)
    repeats = next(calls for below, calls in REPEATS if count <= below)
    messages = repeats * (2 if kind is Collective.SEND_RECV else 1)
    dist.barrier(group=everyone)
    _wait(here)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    _wait(here)
    end = time.perf_counter()
    seconds, elapsed = _slowest([(end - start) / messages, end - begin], everyone, here)
    return seconds, elapsed


def _call(
    kind: Collective, buffer: torch.Tensor, count: int, group: dist.ProcessGroup, size: int
) -> Callable[[], object]:
    """One collective whose whole tensor has `count` bytes; a send goes to a neighbour and back."""
    elements = max(size, count // 4 // size * size)
    whole = buffer[:elements]
    part = torch.empty(elements // size, dtype=buffer.dtype, device=buffer.device)
    if kind is Collective.ALL_REDUCE:
        return lambda: dist.all_reduce(whole, group=group)
    if kind is Collective.ALL_GATHER:
        return lambda: all_gather_single(whole, part, group=group)
    if kind is Collective.REDUCE_SCATTER:
        return lambda: reduce_scatter_single(part, whole, group=group)
    return lambda: _there_and_back(whole, group, size)


def _there_and_back(tensor: torch.Tensor, group: dist.ProcessGroup, size: int) -> None:
    """Ranks of the group in pairs, (0, 1), (2, 3) ...; a last one without a partner looks on."""
    mine = dist.get_group_rank(group, dist.get_rank())
    partner = mine ^ 1
    if partner >= size:
        return
    other = dist.get_global_rank(group, partner)
    if mine < partner:
        dist.send(tensor, other, group=group)
        dist.recv(tensor, other, group=group)
    else:
        dist.recv(tensor, other, group=group)
        dist.send(tensor, other, group=group)


def _link(known: Link | None, fits: Mapping[Collective, LinkFit], name: str, *, scale: int) -> Link:
    """The link with its fits. `scale`: groups that shared a node's cards while they were timed."""
    scaled = {
        kind: found.model_copy(update={"busbw_bytes_per_s": found.busbw_bytes_per_s * scale})
        for kind, found in fits.items()
    }
    collectives = [found for kind, found in scaled.items() if kind is not Collective.SEND_RECV]
    rates = [found.busbw_bytes_per_s for found in collectives]
    lowest, highest = min(rates), max(rates)
    middle, spread = (highest + lowest) / 2, (highest - lowest) / (highest + lowest)
    residual = max(found.relative_residual for found in collectives)
    send = scaled[Collective.SEND_RECV]
    return Link(
        name=known.name if known else name,
        bandwidth_bytes_per_s=_measured(middle, max(spread, residual)),
        latency_s=_measured(send.latency_s, send.relative_residual),
        fits=scaled,
    )
