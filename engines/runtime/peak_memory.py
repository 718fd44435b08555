"""Peak memory of the ranks' devices: tensors, the allocator's reserve, and the rest."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch

from engines.runtime.world import World, sum_over_ranks
from profiles.memory import peak_memory_bytes
from profiles.units import format_gib, format_percent


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The most that one rank held since `profiles.memory.reset_peak_memory`, or ever; bytes.

    Attributes:
        peak_bytes: everything. CUDA: what was reserved, the context, libraries, process groups.
            CPU: the resident set of the process, pages of mapped files that are in memory too.
        allocated_bytes, reserved_bytes: tensors at their fullest moment, and what torch's caching
            allocator held for them (torch.cuda.max_memory_allocated, max_memory_reserved). A CPU
            has no such allocator: 0.
        retries: how often it had to give everything back that was free to find one piece that was
            large enough (`num_alloc_retries`): what comes just before running out.
        away_bytes: what waited in the plan's room outside the device.
    """

    peak_bytes: int
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    retries: int = 0
    away_bytes: int = 0

    @property
    def slack(self) -> float:
        """Reserved beyond the tensors, as a fraction of them: caches, and pieces that are too small
        for what is asked for (fragmentation)."""
        return self.reserved_bytes / self.allocated_bytes - 1 if self.allocated_bytes else 0.0


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """All ranks', in rank order; the same on every rank."""

    ranks: tuple[RankMemory, ...]

    @property
    def fullest(self) -> int:
        """The rank that held most."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].peak_bytes)

    @property
    def slackest(self) -> int:
        """The rank whose allocator held most beyond its tensors."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].slack)

    def __str__(self) -> str:
        most = self.ranks[self.fullest]
        words = f"rank {self.fullest} held most: {format_gib(most.peak_bytes)}"
        if most.allocated_bytes:
            tensors, slack = format_gib(most.allocated_bytes), format_percent(most.slack)
            reserved = format_gib(most.reserved_bytes)
            words += f", {reserved} of it reserved for {tensors} of tensors ({slack} more)"
        if self.ranks[self.slackest].slack > most.slack:
            slack = format_percent(self.ranks[self.slackest].slack)
            words += f"; rank {self.slackest} reserved {slack} more than its tensors"
        retries = sum(rank.retries for rank in self.ranks)
        if retries:
            words += f"; allocators had to give back what was free {retries} times"
        away = max(rank.away_bytes for rank in self.ranks)
        return words + (f"; {format_gib(away)} waited outside" if away else "")


def measure_peak(device: torch.device, *, away_bytes: int = 0) -> RankMemory:
    """Peak memory of this process."""
    peak = peak_memory_bytes(device)
    if device.type != "cuda":
        return RankMemory(peak, away_bytes=away_bytes)
    return RankMemory(
        peak,
        allocated_bytes=torch.cuda.max_memory_allocated(device),
        reserved_bytes=torch.cuda.max_memory_reserved(device),
        retries=int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)),
        away_bytes=away_bytes,
    )


def gathered(own: RankMemory, world: World) -> PeakMemory:
    """The peaks of all ranks; all of them call it."""
    mine = [float(number) for number in astuple(own)]
    rows = [mine if rank == world.rank else [0.0] * len(mine) for rank in range(world.size)]
    sums = sum_over_ranks([number for row in rows for number in row], world)
    whole = [int(number) for number in sums]
    starts = range(0, len(whole), len(mine))
    return PeakMemory(tuple(RankMemory(*whole[i : i + len(mine)]) for i in starts))
