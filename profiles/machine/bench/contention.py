"""The slowdown that computing and communication inflict on each other while they overlap."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from math import ceil

import torch
import torch.distributed as dist

from profiles.machine.bench.device import measured, random_matrix, wait_for
from profiles.machine.bench.job import Job
from profiles.machine.cluster import Overlap
from profiles.provenance import Quantity
from profiles.units import KIB, MIB

# Long beside a scheduler's turn (milliseconds) and beside one product or one message.
WINDOW_S = 0.05
FEWEST_ROUNDS = 3
# A product of a millisecond or less, so that looking whether a message has come costs little: the
# middle of the sizes that `profiles.machine.bench.device` times.
CPU_EDGE, GPU_EDGE = 256, 4096
# Buckets of DDP and units of FSDP are of this size; smaller on a network that is slower than that.
MESSAGE_BYTES, TRIED_BYTES, SMALLEST_BYTES = 16 * MIB, MIB, 64 * KIB
MESSAGES = 4  # in a window: two are on their way at a time


def contention(job: Job, *, budget_s: float) -> Overlap | None:
    """Time products and all-reduces over all ranks, each alone and both at once; None for one rank.

    Both are clocked in a round of their own, in which the other one lasts longer.
    """
    if job.group is None:
        return None
    here = job.device
    edge = GPU_EDGE if here.type == "cuda" else CPU_EDGE
    dtype = torch.bfloat16 if here.type == "cuda" else torch.float32
    left = random_matrix(edge, here, dtype)
    result = torch.empty_like(left)
    message = torch.zeros(TRIED_BYTES // 4, device=here)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(left, left, out=result)
        wait_for(here)

    def send(times: int) -> list[dist.Work]:
        started = [dist.all_reduce(message, group=job.group, async_op=True) for _ in range(times)]
        return [work for work in started if work is not None]

    def finish(works: list[dist.Work]) -> None:
        for work in works:
            work.wait()
        job.finish()

    def all_ranks_s(work: Callable[[], object]) -> float:
        """Seconds of `work`, the slowest rank's."""
        job.barrier()
        begin = time.perf_counter()
        work()
        return job.slowest([time.perf_counter() - begin])[0]

    def until_sent(works: list[dist.Work]) -> None:
        while not works[-1].is_completed():
            multiply(1)
        finish(works)

    multiply(3)
    finish(send(1))
    products = ceil(WINDOW_S / all_ranks_s(lambda: multiply(3)) * 3)
    tried_s = all_ranks_s(lambda: finish(send(1)))
    bytes_ = min(MESSAGE_BYTES, max(SMALLEST_BYTES, TRIED_BYTES * WINDOW_S / MESSAGES / tried_s))
    message = torch.zeros(int(bytes_) // 4, device=here)
    messages = max(MESSAGES, ceil(WINDOW_S / all_ranks_s(lambda: finish(send(1)))))
    slower: list[tuple[float, float]] = []
    began = time.perf_counter()
    spent_s = 0.0
    while len(slower) < FEWEST_ROUNDS or spent_s * (1 + 1 / len(slower)) < budget_s:
        multiplied_s = all_ranks_s(lambda: multiply(products))
        sent_s = all_ranks_s(lambda: finish(send(messages)))
        job.barrier()
        works = send(2 * messages)
        begin = time.perf_counter()
        multiply(products)
        both_multiplied_s = time.perf_counter() - begin
        finish(works)
        both_sent_s = all_ranks_s(lambda: until_sent(send(messages)))
        both_multiplied_s = job.slowest([both_multiplied_s])[0]
        slower.append((both_multiplied_s / multiplied_s, both_sent_s / sent_s))
        spent_s = job.slowest([time.perf_counter() - began])[0]
    computing, communication = zip(*slower, strict=True)
    return Overlap(computing=_factor(computing), communication=_factor(communication))


def _factor(ratios: tuple[float, ...]) -> Quantity:
    """The median; 1 where the times alone were as long, or longer by chance."""
    ordered = sorted(ratios)
    tenth = len(ordered) // 10
    low, high = ordered[tenth], ordered[-1 - tenth]
    middle = max(1.0, statistics.median(ordered))
    return measured(middle, (high - low) / 2 / middle)
