"""Parameter device against ring: traffic of an all-reduce of gradients."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

import torch
import torch.distributed as dist

from engines.optional.aggregation.aggregate import aggregate, stepped
from engines.optional.aggregation.rounds import Round, parts
from engines.plan import Aggregation
from profiles.units import KIB, MIB, format_seconds

DEVICE, RING, BACKEND = Aggregation.GATHER, Aggregation.RING, Aggregation.BACKEND
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
REPEATS, SMALL_REPEATS = 5, 15  # short runs are easily disturbed


@dataclass(frozen=True, slots=True)
class RoundState:
    """A rank's parts after the messages of a round; the first one has no messages.

    Attributes:
        values: of its parts.
        sums: number of ranks summed up in each part.
    """

    messages: Round
    values: tuple[int, ...]

    @property
    def sums(self) -> tuple[int, ...]:
        return tuple(str(value).count("1") for value in self.values)


def step_through(kind: Aggregation) -> list[RoundState]:
    """Sum over this job's ranks, round by round. Rank r starts with 10^r in every part, so each
    digit of a value shows if that rank's contribution is included."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((ranks,), 10**rank)
    rounds = [RoundState((), tuple(tensor.tolist()))]
    for messages in stepped(tensor, kind=kind):
        rounds.append(RoundState(messages, tuple(tensor.tolist())))
    return rounds


class Carried(NamedTuple):
    """Bytes that a rank sent and received in a round."""

    sent: int
    received: int


def count(kind: Aggregation) -> dict[int, list[Carried]]:
    """Count this rank's bytes in every round of a sum of `whole_bytes` over the first 2, 3, ...
    ranks of the job; absent for a number of ranks that excludes it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    carried = {}
    for ranks in range(2, world + 1):
        group = dist.new_group(list(range(ranks)))
        if rank >= ranks:
            continue
        tensor = torch.ones(whole_bytes(world) // 4)
        part_bytes = tensor.nbytes // parts(kind, ranks)
        carried[ranks] = [
            Carried(
                sent=part_bytes * sum(len(m.parts) for m in messages if m.source == rank),
                received=part_bytes * sum(len(m.parts) for m in messages if m.target == rank),
            )
            for messages in stepped(tensor, group, kind=kind)
        ]
        assert bool((tensor == ranks).all())
    return carried


def whole_bytes(ranks: int) -> int:
    """Size of a tensor that 2, 3, ... and `ranks` ranks can split equally."""
    return 4 * lcm(*range(1, ranks + 1))


def busiest(counts: Sequence[Mapping[int, list[Carried]]]) -> dict[int, float]:
    """Return, by number of ranks, the busiest link's one-way traffic in tensors: each round waits
    for its busiest link. `counts` has the results of all ranks."""
    traffic = {}
    for ranks in counts[0]:
        at_once = zip(*(each[ranks] for each in counts if ranks in each), strict=True)
        slowest = sum(max(map(max, carried)) for carried in at_once)
        traffic[ranks] = slowest / whole_bytes(len(counts))
    return traffic


def clock(kinds: Mapping[str, Aggregation]) -> dict[str, list[float]]:
    """Seconds of a sum over all ranks for each of `SIZES`: the slowest rank's median."""
    seconds: dict[str, list[float]] = {}
    for name, kind in kinds.items():
        seconds[name] = []
        for size in SIZES:
            tensor, durations = torch.ones(size // 4), []
            for _ in range(SMALL_REPEATS if size < MIB else REPEATS):
                dist.barrier()
                began = time.perf_counter()
                aggregate(tensor, kind=kind)
                durations.append(time.perf_counter() - began)
            slowest = torch.tensor(statistics.median(durations), dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds[name].append(float(slowest))
    return seconds


def summarize(
    carried: Mapping[str, Mapping[int, float]], seconds: Mapping[str, list[float]]
) -> str:
    """Summarize the plot; arguments as named in the notebook."""
    traffic = ", ".join(
        f"of a {name} from {line[min(line)]:g} to {line[max(line)]:g} tensors"
        for name, line in carried.items()
    )
    ranks = next(iter(carried.values()))
    largest = {name: times[-1] for name, times in seconds.items()}
    by = ", ".join(
        f"{format_seconds(largest[name])} by {name}"
        for name in sorted(largest, key=largest.__getitem__)
    )
    return (
        f"From {min(ranks)} to {max(ranks)} ranks what the busiest link carries grows, {traffic}."
        f" Here all ranks share one memory and no link is between them: {SIZES[-1] // MIB} MiB take"
        f" {by}."
    )
