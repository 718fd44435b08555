"""The collectives of a bench on a clock that stands still but for products and messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed as dist

from profiles.machine.bench import collectives
from profiles.machine.bench.axes import BenchAxis, mesh_axes
from profiles.machine.bench.collectives import TIMED, AxisTimes, Talk, Works, axis_times
from profiles.machine.bench.job import Job
from profiles.machine.cluster import Collective
from profiles.units import KIB, MIB

AXES = mesh_axes(num_nodes=1, devices_per_node=4)
SHORTEST_STREAM_S = 0.05  # with a budget of 20 s
ALWAYS = [4 * KIB, 32 * KIB, 256 * KIB]


@dataclass
class Machine:
    """Four ranks on two cores.

    Attributes:
        product_s: of two matrices of edge 512, while all ranks multiply.
        message_s: of a message without bytes.
        agreeing_s: for the ranks to agree on a number.
        overlaps: a message's own time passes while the one before it sends its bytes.
        sent_s: when the last byte of all messages has arrived: they follow each other.
    """

    product_s: float = 0.011
    message_s: float = 0.002
    bytes_per_s: float = 1e9
    agreeing_s: float = 0.0005
    overlaps: bool = True
    now_s: float = 0.0
    sent_s: float = 0.0
    products_s: list[float] = field(default_factory=list)
    calls: list[tuple[BenchAxis, Collective, int]] = field(default_factory=list)
    rows: Counter[tuple[BenchAxis, Collective, int]] = field(default_factory=Counter)

    def multiply(self, edge: int) -> None:
        took_s = self.product_s * (edge / 512) ** 3
        self.products_s.append(took_s)
        self.now_s += took_s

    def send(self, size: int) -> SimpleNamespace:
        began_s = self.now_s if self.overlaps else max(self.now_s, self.sent_s)
        arrives_s = max(self.sent_s, began_s + self.message_s) + size / self.bytes_per_s
        self.sent_s = arrives_s

        def wait() -> None:
            self.now_s = max(self.now_s, arrives_s)

        return SimpleNamespace(wait=wait)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine in place of this one."""
    here = Machine()

    @contextmanager
    def groups(job: Job, axes: Sequence[BenchAxis]) -> Iterator[list[Talk]]:
        group = cast(dist.ProcessGroup, None)
        yield [Talk.begin(axis, group) for axis in axes]

    def call(_: object, kind: Collective, talk: Talk, count: int) -> Callable[[], Works]:
        here.rows[talk.axis, kind, count] += 1

        def send() -> Works:
            here.calls.append((talk.axis, kind, count))
            return [cast(dist.Work, here.send(count))]

        return send

    def compute(messages: collectives._Messages) -> None:
        here.multiply(messages._left.shape[0])

    clock = SimpleNamespace(perf_counter=lambda: here.now_s)
    monkeypatch.setattr(collectives, "time", clock)
    monkeypatch.setattr(collectives, "_groups", groups)
    monkeypatch.setattr(collectives._Messages, "_call", call)
    monkeypatch.setattr(collectives._Messages, "_compute", compute)
    return here


def benched(
    machine: Machine, *, budget_s: float, largest_bytes: int = 4 * MIB
) -> Mapping[BenchAxis, AxisTimes]:
    class Slow(Job):
        def slowest(self, values: Sequence[float]) -> list[float]:
            machine.now_s += machine.agreeing_s
            return list(values)

    cpu = torch.device("cpu")
    return axis_times(
        Slow(0, 4, cpu, None, cpu, timedelta(seconds=9), 0.0),
        AXES,
        budget_s=budget_s,
        largest_bytes=largest_bytes,
        tell=lambda _: None,
    )


@pytest.mark.parametrize("budget_s", [2.5, 10.0, 60.0])
def test_a_bench_of_processors_that_share_cores_keeps_to_its_budget(
    machine: Machine, budget_s: float
) -> None:
    benched(machine, budget_s=budget_s)
    assert machine.now_s < 1.3 * budget_s
    for axis in AXES:
        for kind in TIMED:
            for size in ALWAYS:
                assert machine.rows[axis, kind, size] >= 3
    if budget_s >= 10:  # most of it is left for larger messages
        assert max(machine.rows[axis, Collective.ALL_REDUCE, 2 * MIB] for axis in AXES) >= 3


def test_with_time_enough_calls_follow_each_other_for_twenty_milliseconds(machine: Machine) -> None:
    benched(machine, budget_s=200.0)
    row = AXES[0], Collective.ALL_GATHER, 4 * KIB
    # Two milliseconds a call, alone and with products between; the first row knows nothing yet.
    assert machine.calls.count(row) / machine.rows[row] == pytest.approx(2 * 10, abs=2)


@pytest.mark.parametrize(("product_s", "most_s"), [(0.0027, 0.0027), (0.011, 0.003)])
def test_ranks_compute_some_milliseconds_between_messages(
    machine: Machine, product_s: float, most_s: float
) -> None:
    """A whole product with a core for each rank, a smaller one where they share cores."""
    machine.product_s = product_s
    benched(machine, budget_s=20.0)
    assert most_s / 2 < machine.products_s[-1] <= most_s


def test_a_message_costs_what_it_adds_to_computing(machine: Machine) -> None:
    """Whatever is computed between, a call takes its own latency and bytes."""
    for product_s in (1e-6, 0.011):
        machine.product_s = product_s
        fitted = benched(machine, budget_s=20.0)[AXES[0]].fits[Collective.ALL_GATHER]
        assert fitted.latency_s == pytest.approx(machine.message_s, rel=1e-3)
        # An all-gather of n ranks sends (n - 1) / n of the whole tensor.
        share = (AXES[0].size - 1) / AXES[0].size
        reached = fitted.busbw_bytes_per_s / share / machine.bytes_per_s
        # No more than a stream shows, whose first message has its latency too.
        assert 1 - machine.message_s / SHORTEST_STREAM_S < reached < 1 + 1e-3


def test_a_rate_is_that_of_bytes_where_ranks_wait_for_each_other_in_every_message(
    machine: Machine,
) -> None:
    """A short budget times short messages alone: of 256 KiB the waits take 95 %."""
    machine.message_s, machine.overlaps = 0.005, False
    times = benched(machine, budget_s=6.0, largest_bytes=64 * MIB)[AXES[0]]
    assert max(size for axis, _, size in machine.rows if axis == AXES[0]) >= 16 * MIB
    assert times.streamed_bytes_per_s > 0.7 * bus_factor() * machine.bytes_per_s


def bus_factor() -> float:
    return Collective.ALL_REDUCE.bus_factor(AXES[0].size)
