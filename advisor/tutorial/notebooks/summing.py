"""Parameter device against ring: what travels when ranks sum up their gradients."""

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
REPEATS, SMALL_REPEATS = 5, 15  # what is short is soon disturbed


@dataclass(frozen=True, slots=True)
class Moment:
    """What a rank holds when the messages of a round have arrived; none before the first.

    Attributes:
        held: its parts.
        sums: of how many ranks each of them is the sum.
    """

    messages: Round
    held: tuple[int, ...]

    @property
    def sums(self) -> tuple[int, ...]:
        return tuple(str(value).count("1") for value in self.held)


def step_through(kind: Aggregation) -> list[Moment]:
    """A sum over the ranks of this job, round by round. Rank r begins with 10^r in every part, so
    that each digit of a number says whether that rank's is in it already."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((ranks,), 10**rank)
    found = [Moment((), tuple(tensor.tolist()))]
    for messages in stepped(tensor, kind=kind):
        found.append(Moment(messages, tuple(tensor.tolist())))
    return found


class Carried(NamedTuple):
    """Bytes that a rank sent and received in a round."""

    sent: int
    received: int


def count(kind: Aggregation) -> dict[int, list[Carried]]:
    """What this rank carries in every round of a sum over the first 2, 3, ... ranks of the job, of
    a tensor of `whole_bytes`. Those who are not among them carry nothing."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {}
    for ranks in range(2, world + 1):
        group = dist.new_group(list(range(ranks)))
        if rank >= ranks:
            continue
        tensor = torch.ones(whole_bytes(world) // 4)
        part_bytes = tensor.nbytes // parts(kind, ranks)
        found[ranks] = [
            Carried(
                sent=part_bytes * sum(len(m.parts) for m in messages if m.source == rank),
                received=part_bytes * sum(len(m.parts) for m in messages if m.target == rank),
            )
            for messages in stepped(tensor, group, kind=kind)
        ]
        assert bool((tensor == ranks).all())
    return found


def whole_bytes(ranks: int) -> int:
    """Of a tensor that 2, 3, ... and `ranks` ranks can share equally."""
    return 4 * lcm(*range(1, ranks + 1))


def busiest(counts: Sequence[Mapping[int, list[Carried]]]) -> dict[int, float]:
    """By number of ranks, what the busiest link carries in one direction, in tensors: in every
    round some link is the busiest, and the others wait for it. `counts` is of all ranks."""
    found = {}
    for ranks in counts[0]:
        at_once = zip(*(each[ranks] for each in counts if ranks in each), strict=True)
        slowest = sum(max(map(max, carried)) for carried in at_once)
        found[ranks] = slowest / whole_bytes(len(counts))
    return found


def clock(kinds: Mapping[str, Aggregation]) -> dict[str, list[float]]:
    """Seconds of a sum over all ranks for each of `SIZES`: the median of the slowest rank's."""
    found: dict[str, list[float]] = {}
    for name, kind in kinds.items():
        found[name] = []
        for size in SIZES:
            tensor, laps = torch.ones(size // 4), []
            for _ in range(SMALL_REPEATS if size < MIB else REPEATS):
                dist.barrier()
                began = time.perf_counter()
                aggregate(tensor, kind=kind)
                laps.append(time.perf_counter() - began)
            slowest = torch.tensor(statistics.median(laps), dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            found[name].append(float(slowest))
    return found


def seen(carried: Mapping[str, Mapping[int, float]], seconds: Mapping[str, list[float]]) -> str:
    """The picture in a sentence; of both, the names of the notebook."""
    said = ", ".join(
        f"of a {name} from {line[min(line)]:g} to {line[max(line)]:g} tensors"
        for name, line in carried.items()
    )
    ranks = next(iter(carried.values()))
    largest = {name: found[-1] for name, found in seconds.items()}
    by = ", ".join(
        f"{format_seconds(largest[name])} by {name}"
        for name in sorted(largest, key=largest.__getitem__)
    )
    return (
        f"From {min(ranks)} to {max(ranks)} ranks what the busiest link carries grows, {said}."
        f" Here all ranks share one memory and no link is between them: {SIZES[-1] // MIB} MiB take"
        f" {by}."
    )
