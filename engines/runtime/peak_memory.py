"""Peak memory of the ranks' devices: tensors, the allocator's reserve, and the rest."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch

from engines.runtime.world import World, sum_over_ranks
from profiles.allocator.process_peak import peak_memory_bytes
from profiles.units import format_gib, format_percent


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Peak memory of one rank since `profiles.allocator.process_peak.reset_peak_memory`, or ever;
    bytes.

    Attributes:
        peak_bytes: everything. CUDA: what was reserved, the context, libraries, process groups.
            CPU: the resident set of the process, pages of mapped files that are in memory too.
        allocated_bytes, reserved_bytes: peak of tensors, and of the memory that torch's caching
            allocator reserved for them (torch.cuda.max_memory_allocated, max_memory_reserved). A
            CPU has no caching allocator: 0.
        retries: how often it had to free its cache to allocate (`num_alloc_retries`), just before
            running out.
        offloaded_bytes: peak of the plan's pool outside the device.
    """

    peak_bytes: int
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    retries: int = 0
    offloaded_bytes: int = 0

    @property
    def slack(self) -> float:
        """Reserved beyond the tensors, as a fraction of them: caches and fragmentation."""
        return self.reserved_bytes / self.allocated_bytes - 1 if self.allocated_bytes else 0.0


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """All ranks', in rank order; the same on every rank."""

    ranks: tuple[RankMemory, ...]

    @property
    def fullest(self) -> int:
        """The rank with the highest peak."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].peak_bytes)

    @property
    def slackest(self) -> int:
        """The rank whose allocator reserved most beyond its tensors."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].slack)

    def __str__(self) -> str:
        most = self.ranks[self.fullest]
        words = f"rank {self.fullest} has the highest peak: {format_gib(most.peak_bytes)}"
        if most.allocated_bytes:
            tensors, slack = format_gib(most.allocated_bytes), format_percent(most.slack)
            reserved = format_gib(most.reserved_bytes)
            words += f", {reserved} of it reserved for {tensors} of tensors ({slack} more)"
        if self.ranks[self.slackest].slack > most.slack:
            slack = format_percent(self.ranks[self.slackest].slack)
            words += f"; rank {self.slackest} reserved {slack} more than its tensors"
        retries = sum(rank.retries for rank in self.ranks)
        if retries:
            words += f"; allocators had to free their cache {retries} times"
        offloaded = max(rank.offloaded_bytes for rank in self.ranks)
        return words + (f"; {format_gib(offloaded)} were offloaded" if offloaded else "")


def measure_peak(device: torch.device, *, offloaded_bytes: int = 0) -> RankMemory:
    """Peak memory of this process."""
    peak = peak_memory_bytes(device)
    if device.type != "cuda":
        return RankMemory(peak, offloaded_bytes=offloaded_bytes)
    return RankMemory(
        peak,
        allocated_bytes=torch.cuda.max_memory_allocated(device),
        reserved_bytes=torch.cuda.max_memory_reserved(device),
        retries=int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)),
        offloaded_bytes=offloaded_bytes,
    )


def gather_peaks(own: RankMemory, world: World) -> PeakMemory:
    """The peaks of all ranks; all of them call it."""
    mine = [float(number) for number in astuple(own)]
    rows = [mine if rank == world.rank else [0.0] * len(mine) for rank in range(world.size)]
    sums = sum_over_ranks([number for row in rows for number in row], world)
    whole = [int(number) for number in sums]
    starts = range(0, len(whole), len(mine))
    return PeakMemory(tuple(RankMemory(*whole[i : i + len(mine)]) for i in starts))
