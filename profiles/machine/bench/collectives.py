"""Timings of collectives over message sizes, on every mesh axis, all groups of an axis at once."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from profiles.machine.bench.axes import BenchAxis
from profiles.machine.bench.device import rounded, wait_for
from profiles.machine.bench.job import Job
from profiles.machine.cluster import Collective, LinkFit
from profiles.machine.link_fit import fit
from profiles.torch_compat import all_gather_single, reduce_scatter_single
from profiles.units import KIB, MIB

TIMED = tuple(Collective)
SMALLEST_BYTES = 4 * KIB
# Eight-fold steps: one a decade is enough for a line through latency and bandwidth.
STEP = 8
# Timed whatever the budget: below it a slow machine's jitter hides the bandwidth.
ALWAYS_BYTES = 256 * KIB
# A GPU's links are not full before some hundred MiB (nccl-tests' published curves).
CPU_LARGEST_BYTES, GPU_LARGEST_BYTES = 64 * MIB, 1024 * MIB
# A median needs three; more only where the budget allows.
FEWEST_ROUNDS, MOST_ROUNDS = 3, 25
# After a barrier the ranks wake up to a scheduler's tick apart, milliseconds where they share
# cores. Calls in a row, as many as make this or this many, make that small beside them; but no
# more than the budget has time for, where the sizes that are always timed may take two fifths.
IN_A_ROW_S, MOST_IN_A_ROW, COMPUTED_IN_A_ROW = 0.02, 16, 4
ALWAYS_SHARE = 0.4
# A collective's rate is seen in messages that follow each other for this long; those of all axes
# take at most this share of the budget.
IN_A_STREAM_S, STREAM_SHARE, MOST_STREAMED = 0.3, 0.35, 256
# The rate is that of messages whose bytes take most of their time: a message of this many times the
# shortest one's. Ranks that share cores wait milliseconds for each other in every message, and a
# stream of short ones has the rate of their waits.
RATE_BOUND = 4.0
# A step computes between its collectives. On processors that costs them: threads that send find
# their core taken, and ranks come at different times. Some milliseconds, as between layers: the
# product of this edge where a rank has a core, a smaller one where ranks share them.
COMPUTED_EDGE, COMPUTED_S = 512, 0.003
SMALLEST_EDGE = 64

Tell = Callable[[str], None]
"""Called with what is being timed."""
Works = Sequence[dist.Work | None]
"""Messages on their way."""


@dataclass(frozen=True, slots=True)
class AxisTimes:
    """Lines of an axis, and its rate when all groups send at once.

    Attributes:
        fits: latency and bus bandwidth of one group, with computation between the calls; no fit is
            faster than the stream of that collective. What looks so is the noise of short messages,
            groups that took turns, or a burst that a link lets pass.
        streamed_bytes_per_s: bus bandwidth of one group in all-reduces that follow each other,
            until the last group has ended.
    """

    fits: dict[Collective, LinkFit]
    streamed_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Stream:
    """Messages of one collective that followed each other: seconds until the last one's end.

    Attributes:
        count: bytes of the whole tensor of one message.
        bus_factor: bytes that each rank sent for each of them (`Collective.bus_factor`).
    """

    count: int
    messages: int
    bus_factor: float
    seconds: float

    @property
    def traffic_bytes(self) -> float:
        return self.bus_factor * self.count * self.messages

    @property
    def bytes_per_s(self) -> float:
        return self.traffic_bytes / self.seconds


@dataclass(frozen=True, slots=True)
class Talk:
    """This rank's group of an axis, and the seconds of its messages: by collective and size; and
    its streams, by collective."""

    axis: BenchAxis
    group: dist.ProcessGroup
    seconds: dict[Collective, dict[int, list[float]]]
    streams: dict[Collective, list[Stream]]

    @classmethod
    def begin(cls, axis: BenchAxis, group: dist.ProcessGroup) -> Talk:
        """Nothing has been timed."""
        return cls(axis, group, {kind: {} for kind in TIMED}, {kind: [] for kind in TIMED})

    @property
    def streamed_bytes_per_s(self) -> float:
        """That of all-reduces."""
        return self._stream(Collective.ALL_REDUCE).bytes_per_s

    def sizes(self) -> list[int]:
        """Those that have been timed."""
        return list(self.seconds[TIMED[0]])

    def forget(self) -> None:
        """Begin anew."""
        for by_size in self.seconds.values():
            by_size.clear()

    def fits(self) -> dict[Collective, LinkFit]:
        """The line of each collective."""
        return {kind: self._fit(kind, self._stream(kind)) for kind in TIMED}

    def _stream(self, kind: Collective) -> Stream:
        """The one between a faster and a slower one."""
        in_order = sorted(self.streams[kind], key=lambda stream: stream.bytes_per_s)
        return in_order[len(in_order) // 2]

    def _fit(self, kind: Collective, stream: Stream) -> LinkFit:
        """The line through the medians and the stream, which is one long message: a slow link, or
        ranks that share cores, leave time for short ones alone, whose jitter hides the bytes."""
        factor = kind.bus_factor(self.axis.size)
        points = [(factor * n, statistics.median(s)) for n, s in self.seconds[kind].items()]
        exact = fit([*points, (stream.traffic_bytes, stream.seconds)])
        return LinkFit(
            latency_s=rounded(exact.latency_s),
            busbw_bytes_per_s=rounded(min(exact.busbw_bytes_per_s, stream.bytes_per_s)),
            relative_residual=rounded(exact.relative_residual),
        )


def axis_times(
    job: Job,
    axes: Sequence[BenchAxis],
    *,
    budget_s: float,
    largest_bytes: int,
    tell: Tell,
) -> Mapping[BenchAxis, AxisTimes]:
    """Time every collective on every axis, then messages in a stream, and fit each.

    Rounds interleave axes, sizes and collectives, so that a disturbance of a second touches one
    sample of many. The first round climbs from size to size; an axis stops before one that would
    not be seen three times, so slow axes get smaller messages than fast ones.
    """
    if not axes:
        return {}
    began = time.perf_counter()
    largest = max(largest_bytes, ALWAYS_BYTES)
    streams = FEWEST_ROUNDS * len(axes) * len(TIMED)
    stream_s = max(0.0, min(IN_A_STREAM_S, STREAM_SHARE * budget_s / streams))
    budget_s -= stream_s * streams
    messages = _Messages(job, largest, row_s=ALWAYS_SHARE * budget_s / fewest_rows(len(axes)))

    def spent_s() -> float:
        return job.slowest([time.perf_counter() - began])[0]

    with _groups(job, axes) as talks:
        tell("connections")
        for talk in talks:  # they are made on first use
            for kind in TIMED:
                messages.time_once(kind, talk, SMALLEST_BYTES)
            talk.forget()
        _climb(talks, messages, spent_s, budget_s=budget_s, largest_bytes=largest, tell=tell)
        first_s = used_s = spent_s()
        for done in range(1, MOST_ROUNDS):
            if done >= FEWEST_ROUNDS and used_s + (used_s - first_s) / (done - 1) > budget_s:
                break
            messages.time_computing()
            for talk in talks:
                tell(f"{talk.axis}, round {done + 1}")
                for count in talk.sizes():
                    for kind in TIMED:
                        messages.time_once(kind, talk, count)
            used_s = spent_s()
        for turn in range(FEWEST_ROUNDS):
            for talk in talks:
                tell(f"{talk.axis}, streams, round {turn + 1}")
                for kind in TIMED:
                    messages.time_stream(kind, talk, stream_s)
        return {talk.axis: AxisTimes(talk.fits(), talk.streamed_bytes_per_s) for talk in talks}


def fewest_rows(axes: int) -> int:
    """Number of rows of calls that are timed whatever the budget."""
    sizes = 1 + round(math.log(ALWAYS_BYTES / SMALLEST_BYTES, STEP))
    return FEWEST_ROUNDS * axes * sizes * len(TIMED)


def _climb(
    talks: Sequence[Talk],
    messages: _Messages,
    spent_s: Callable[[], float],
    *,
    budget_s: float,
    largest_bytes: int,
    tell: Tell,
) -> None:
    """The first round: sizes as large as can be seen three times in `budget_s`."""
    climbing, count, began_s = list(talks), SMALLEST_BYTES, spent_s()
    while climbing and count <= largest_bytes:
        took_s: dict[BenchAxis, float] = {}
        for talk in climbing:
            tell(f"{talk.axis}, {count // KIB} KiB")
            before_s = spent_s()
            for kind in TIMED:
                messages.time_once(kind, talk, count)
            took_s[talk.axis] = spent_s() - before_s
        timed, count = count, STEP * count
        if count <= ALWAYS_BYTES:
            continue
        # Fast axes first: a slow one must not keep them from the sizes that fill them.
        planned_s, going_on = spent_s(), []
        for talk in sorted(climbing, key=lambda talk: took_s[talk.axis]):
            # Rows of several calls get shorter as messages get longer; those of one do not.
            once_s = sum(by_size[timed][-1] for by_size in talk.seconds.values())
            planned_s += max(took_s[talk.axis], STEP * 2 * once_s)
            if began_s + FEWEST_ROUNDS * (planned_s - began_s) <= budget_s:
                going_on.append(talk)
        climbing = going_on


@contextmanager
def _groups(job: Job, axes: Sequence[BenchAxis]) -> Iterator[list[Talk]]:
    """This rank's group of each axis, for as long as the body runs."""
    talks: list[Talk] = []
    try:
        for axis in axes:
            for ranks in axis.groups(job.ranks):  # every rank takes part in making every group
                group = dist.new_group(ranks, timeout=job.patience)
                if job.rank in ranks:
                    talks.append(Talk.begin(axis, group))
        yield talks
    finally:
        for talk in talks:
            dist.destroy_process_group(talk.group)


class _Messages:
    """The tensors that are sent and received, and the clock.

    Args:
        row_s: for one row of calls with what is computed between them; the same on all ranks.
    """

    def __init__(self, job: Job, largest_bytes: int, *, row_s: float) -> None:
        self._job, self._row_s = job, row_s
        self._sent = torch.zeros(largest_bytes // 4, dtype=torch.float32, device=job.device)
        self._received = torch.zeros_like(self._sent)
        self._take_product(COMPUTED_EDGE)
        if self._computed_s:
            # Two calls fit in a row, or one with as much time to compute.
            wanted_s = max(0.0, min(COMPUTED_S, row_s / 2))
            edge = COMPUTED_EDGE * min(1.0, wanted_s / self._computed_s[-1]) ** (1 / 3)
            self._take_product(max(SMALLEST_EDGE, int(edge) // SMALLEST_EDGE * SMALLEST_EDGE))

    def _take_product(self, edge: int) -> None:
        """Compute this between calls."""
        self._left = torch.ones(edge, edge)
        self._result = torch.empty_like(self._left)
        self._compute()
        self._computed_s = list[float]()
        self.time_computing()

    def time_computing(self) -> None:
        """Note the seconds of what is computed between two messages, while all ranks compute."""
        if self._job.device.type == "cpu":
            self._computed_s.append(self._clocked(COMPUTED_IN_A_ROW, self._compute))

    def time_once(self, kind: Collective, talk: Talk, count: int) -> None:
        """Note the seconds that one message of `count` bytes adds to computing."""
        begin = self._call(kind, talk, count)

        def call() -> None:
            _wait(begin())

        # What the ranks know of one call, from smaller messages; the same on all.
        last_s = next((times[-1] for times in reversed(talk.seconds[kind].values())), 0.0)
        if count in talk.seconds[kind]:
            last_s = talk.seconds[kind][count][-1]
        computed_s = statistics.median(self._computed_s) if self._computed_s else 0.0
        wanted = min(MOST_IN_A_ROW, math.ceil(IN_A_ROW_S / max(last_s, 1e-6)))
        fitting = int(self._row_s / max(2 * last_s + computed_s, 1e-6))
        repeats = max(1, min(wanted, fitting))
        added_s = self._clocked(repeats, call)
        if self._computed_s:
            added_s = max(added_s, self._clocked(repeats, self._compute, call) - computed_s)
        talk.seconds[kind].setdefault(count, []).append(added_s)

    def _clocked(self, repeats: int, *work: Callable[[], object]) -> float:
        """Seconds of doing all of `work` once, of `repeats` in a row; the slowest rank's."""
        self._job.barrier()
        begin = time.perf_counter()
        for _ in range(repeats):
            for each in work:
                each()
        wait_for(self._job.device)
        return self._job.slowest([time.perf_counter() - begin])[0] / repeats

    def time_stream(self, kind: Collective, talk: Talk, stream_s: float) -> None:
        """Note the largest messages of this rank's group, several on their way.

        Groups that compute between their calls take turns on the link they share: each gets all of
        it while the others compute, and their sum is more than the link carries. On processors the
        time of a message varies by more than a fast link needs for its bytes.
        """
        before = talk.streams[kind]
        if before:
            count, one_s = before[0].count, before[0].seconds / before[0].messages
        else:
            count, one_s = self._streamed(kind, talk, stream_s)
        call = self._call(kind, talk, count)
        repeats = max(1, min(MOST_STREAMED, math.ceil(stream_s / one_s)))
        took_s = self._streaming_s(call, repeats)
        before.append(Stream(count, repeats, kind.bus_factor(talk.axis.size), took_s))

    def _streaming_s(self, call: Callable[[], Works], messages: int) -> float:
        """Seconds until the last of them has ended, all on their way at once."""

        def stream() -> None:
            for works in [call() for _ in range(messages)]:
                _wait(works)

        return self._clocked(1, stream)

    def _streamed(self, kind: Collective, talk: Talk, stream_s: float) -> tuple[int, float]:
        """Bytes of a message that a stream is made of, and its seconds alone; the same on all
        ranks.

        Larger than those that were timed where several fit in the time, or where what they took
        is the wait for each other.
        """
        count = talk.sizes()[-1]
        typical_s = {n: statistics.median(times) for n, times in talk.seconds[kind].items()}
        one_s, waits_s = typical_s[count], min(typical_s.values())
        while STEP * count <= self._sent.nbytes and one_s <= max(
            stream_s / STEP, min(stream_s, RATE_BOUND * waits_s)
        ):
            count *= STEP
            one_s = self._streaming_s(self._call(kind, talk, count), 1)
        return count, one_s

    def _compute(self) -> None:
        """Compute on the processor, as a step does between its collectives."""
        torch.mm(self._left, self._left, out=self._result)

    def _call(self, kind: Collective, talk: Talk, count: int) -> Callable[[], Works]:
        """Begin one collective whose whole tensor has `count` bytes."""
        size, group = talk.axis.size, talk.group
        elements = max(size, count // 4 // size * size)
        whole, other = self._sent[:elements], self._received[:elements]
        part = other[: elements // size]
        match kind:
            case Collective.ALL_REDUCE:
                return lambda: [dist.all_reduce(whole, group=group, async_op=True)]
            case Collective.ALL_GATHER:
                return lambda: [all_gather_single(whole, part, group=group, async_op=True)]
            case Collective.REDUCE_SCATTER:
                return lambda: [reduce_scatter_single(part, whole, group=group, async_op=True)]
            case Collective.ALL_TO_ALL:
                return lambda: [dist.all_to_all_single(other, whole, group=group, async_op=True)]
            case Collective.SEND_RECV:
                return lambda: _pass_on(whole, other, group, size)


def _pass_on(
    sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup, size: int
) -> Works:
    """Every rank sends to the next one and receives from the one before, as pipelines do."""
    mine = dist.get_group_rank(group, dist.get_rank())
    after = dist.get_global_rank(group, (mine + 1) % size)
    before = dist.get_global_rank(group, (mine - 1) % size)
    pair = [
        dist.P2POp(dist.isend, sent, after, group=group),
        dist.P2POp(dist.irecv, received, before, group=group),
    ]
    return dist.batch_isend_irecv(pair)


def _wait(works: Works) -> None:
    for work in works:
        if work is not None:
            work.wait()
