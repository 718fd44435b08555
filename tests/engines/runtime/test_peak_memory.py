"""Peak memory of ranks: read from the allocator's counters, gathered, said in a sentence."""

from __future__ import annotations

import os
import resource

import pytest
import torch

from engines.plan import Plan
from engines.runtime.peak_memory import PeakMemory, RankMemory, gather_peaks, measure_peak
from engines.runtime.world import World
from profiles.units import GIB, MIB
from tests.engines.cases import CASES
from tests.engines.parity import alone, parallelize
from tests.workers import Pool

CPU = torch.device("cpu")


def gpu(allocated_gib: float, reserved_gib: float, *, retries: int = 0) -> RankMemory:
    return RankMemory(
        peak_bytes=int((reserved_gib + 0.5) * GIB),
        allocated_bytes=int(allocated_gib * GIB),
        reserved_bytes=int(reserved_gib * GIB),
        retries=retries,
    )


def test_slack_is_what_is_reserved_beyond_the_tensors() -> None:
    assert gpu(40, 44).slack == pytest.approx(0.1)
    assert RankMemory(GIB).slack == 0.0  # nothing is reserved on a CPU


def test_the_allocators_counters_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 GiB 20 are free; the allocator has 50 now, so 10 are outside it."""
    fakes = {
        "mem_get_info": lambda device: (20 * GIB, 80 * GIB),
        "memory_reserved": lambda device: 50 * GIB,
        "max_memory_reserved": lambda device: 55 * GIB,
        "max_memory_allocated": lambda device: 50 * GIB,
        "memory_stats": lambda device: {"num_alloc_retries": 3, "num_ooms": 0},
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    actual = measure_peak(torch.device("cuda", 0), offloaded_bytes=7)
    assert actual == RankMemory(65 * GIB, 50 * GIB, 55 * GIB, 3, 7)
    assert actual.slack == pytest.approx(0.1)


def test_a_cpu_rank_reports_its_resident_set() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    actual = measure_peak(CPU)  # the kernel counts in batches: within some pages of each other
    assert 0 < actual.peak_bytes <= before + 16 * MIB
    assert (actual.allocated_bytes, actual.reserved_bytes) == (0, 0)


def test_the_summary_names_the_fullest_rank_and_the_one_with_most_slack() -> None:
    said = str(PeakMemory((gpu(40, 42), gpu(30, 36), gpu(20, 21, retries=2))))
    assert said == (
        "rank 0 has the highest peak: 42.5 GiB, 42.0 GiB of it reserved for 40.0 GiB of tensors"
        " (5.0% more);"
        " rank 1 reserved 20% more than its tensors; allocators had to free their cache 2"
        " times"
    )


def test_one_rank_gathers_nothing() -> None:
    own = RankMemory(5, 4, 3, 2, 1)
    assert gather_peaks(own, World(rank=0, size=1, device=CPU, timeout_s=1.0)) == PeakMemory((own,))


def test_offloaded_bytes_are_reported() -> None:
    plan = Plan.parse("offload=optimizer,activations")
    _, parallel = alone("gpt", plan=plan)
    parallel.train_step(CASES["gpt"].batch(4))
    actual = parallel.memory()
    assert actual.ranks[0].offloaded_bytes == parallel.offload_pool.peak_bytes > 0  # type: ignore[union-attr]
    assert "were offloaded" in str(actual)


def _of_two() -> tuple[PeakMemory, int]:
    _, _, parallel = parallelize("gpt", "dp_replicate=2")
    return parallel.memory(), os.getpid()


@pytest.mark.dist
def test_every_rank_knows_the_peaks_of_all_ranks(pool: Pool) -> None:
    (first, one), (second, other) = pool.run(_of_two, world_size=2)
    assert first == second
    assert len(first.ranks) == 2
    assert one != other
    assert all(rank.peak_bytes > 0 for rank in first.ranks)
