"""Aggregations over links of a known rate: what was measured beside what is predicted.

`python -m tests.benchmarks.aggregation` (root, Linux) measures and writes
`tests/validation/aggregation.json`; `--show` prints its table. Four nodes around a switch, 100
Mbit/s each way (tests.namespaces), one rank each: every kind over two to four of them. Then two
nodes of two ranks, where a hierarchy has a place.

Predictions know nothing of the aggregations: a link's latency and rate come from messages that two
ranks exchange. What a card carried is counted by the kernel.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from advisor.cost.communication.aggregation import price
from engines.plan import Aggregation
from profiles.machine.cluster import ClusterProfile, Collective, Link, LinkFit
from profiles.provenance import Quantity, Source
from profiles.record import Document, Record
from profiles.units import MIB
from tests.engines.cases import cpu_ranks
from tests.namespaces import Node, star, torchrun, two_nodes
from tests.validation.command import command

REPORT = Path(__file__).parents[1] / "validation" / "aggregation.json"
RATE_BYTES_PER_S = 12.5e6  # 100 Mbit/s
SIZES = (MIB // 4, MIB, 4 * MIB)
REPEATS = 3
TIME_LIMIT_S = 400.0


class Line(Record):
    """A link between two ranks: seconds = latency + bytes / rate."""

    latency_s: float
    bytes_per_s: float


class Row(Record):
    """One aggregation.

    Attributes:
        nodes: that the ranks are on, in equal numbers.
        devices: parameter devices, where that is the kind.
        measured_s: the median of the slowest rank's.
        card_bytes: that the busiest card sent and received, headers and all.
        predicted_error: half of the stated range, as a part of the prediction.
        link_bytes, buffer_bytes: as predicted.
    """

    kind: Aggregation
    devices: int
    ranks: int
    nodes: int
    tensor_bytes: int
    measured_s: float
    card_bytes: float
    predicted_s: float = 0.0
    predicted_error: float = 0.0
    link_bytes: float = 0.0
    buffer_bytes: float = 0.0


class Report(Document):
    """The sweep, and on what it was measured."""

    measured_at: str
    machine: str
    torch: str
    line_bytes_per_s: float
    between: Line
    inside: Line
    rows: tuple[Row, ...]


def measured(nodes: tuple[Node, ...], ranks_per_node: int) -> dict[str, object]:
    """Measurements that rank 0 wrote.

    Raises:
        RuntimeError: a rank failed; with its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        program = ["-m", "tests.benchmarks.aggregation", "--rank", str(path)]
        exits = torchrun(nodes, program, ranks_per_node=ranks_per_node, timeout_s=TIME_LIMIT_S)
        if any(node.code for node in exits) or not path.exists():
            raise RuntimeError("\n".join(node.output for node in exits))
        document: dict[str, object] = json.loads(path.read_text())
        return document


def machines(nodes: int, per_node: int, *, between: Line, inside: Line) -> ClusterProfile:
    """A cluster with these links."""

    def link(name: str, line: Line) -> Link:
        def known(value: float) -> Quantity:
            return Quantity(value=value, source=Source.MEASURED)

        fit = LinkFit(latency_s=line.latency_s, busbw_bytes_per_s=line.bytes_per_s)
        return Link(
            name=name,
            bandwidth_bytes_per_s=known(line.bytes_per_s),
            latency_s=known(line.latency_s),
            fits={Collective.SEND_RECV: fit, Collective.ALL_REDUCE: fit},
        )

    return cpu_ranks(nodes * per_node, nodes=nodes).model_copy(
        update={
            "inter": link("between", between) if nodes > 1 else None,
            "intra": link("inside", inside) if per_node > 1 else None,
        }
    )


def rows_of(document: dict[str, object], between: Line, inside: Line) -> Iterator[Row]:
    """Pair measurements with their estimated costs."""
    times = document["times"]
    assert isinstance(times, list)
    for each in times:
        row = Row(
            kind=Aggregation(each["kind"]),
            devices=each["devices"],
            ranks=each["ranks"],
            nodes=each["nodes"],
            tensor_bytes=each["bytes"],
            measured_s=each["seconds"],
            card_bytes=each["card_bytes"],
        )
        yield priced(row, between, inside)


def priced(row: Row, between: Line, inside: Line) -> Row:
    """With what is predicted for it today."""
    per_node = row.ranks // row.nodes
    cost = price(
        row.kind,
        row.tensor_bytes,
        machines(row.nodes, per_node, between=between, inside=inside),
        group_size=row.ranks,
        devices=row.devices,
    )
    return row.model_copy(
        update={
            "predicted_s": cost.seconds,
            "predicted_error": cost.relative_error,
            "link_bytes": cost.link_bytes,
            "buffer_bytes": cost.buffer_bytes,
        }
    )


def repriced() -> Report:
    """Load the committed report, predicted by today's code from the links it stores."""
    report = Report.load(REPORT)
    rows = tuple(priced(row, report.between, report.inside) for row in report.rows)
    return report.model_copy(update={"rows": rows})


def measure() -> Report:
    """Both set-ups, one after the other."""
    import torch

    with star(4, rate_bytes_per_s=RATE_BYTES_PER_S) as nodes:
        around = measured(nodes, 1)
    with two_nodes(rate_bytes_per_s=RATE_BYTES_PER_S) as pair:
        across = measured(pair, 2)
    between = Line.model_validate(around["line"])
    inside = Line.model_validate(across["line"])
    return Report(
        measured_at=datetime.now(UTC).strftime("%Y-%m-%d"),
        machine=f"{os.cpu_count()} cores",
        torch=torch.__version__,
        line_bytes_per_s=RATE_BYTES_PER_S,
        between=between,
        inside=inside,
        rows=(*rows_of(around, between, inside), *rows_of(across, between, inside)),
    )


def table(report: Report) -> str:
    """The report for a person: milliseconds, and what the busiest card carried in tensors."""
    lines = [
        f"{report.line_bytes_per_s / 1e6:.1f} MB/s each way; between two ranks"
        f" {report.between.bytes_per_s / 1e6:.1f} MB/s after"
        f" {report.between.latency_s * 1e3:.2f} ms",
        f"{'aggregation':<20}{'ranks':>6}{'nodes':>6}{'MiB':>7}{'measured':>10}{'predicted':>10}"
        f"{'ratio':>7}{'card':>7}{'said':>7}{'buffer':>8}",
    ]
    for row in report.rows:
        name = row.kind if row.devices == 1 else f"{row.kind} x {row.devices}"
        size = row.tensor_bytes
        lines.append(
            f"{name:<20}{row.ranks:>6}{row.nodes:>6}{size / MIB:>7.2f}"
            f"{row.measured_s * 1e3:>10.1f}{row.predicted_s * 1e3:>10.1f}"
            f"{row.predicted_s / row.measured_s:>7.2f}{row.card_bytes / size:>7.2f}"
            f"{row.link_bytes / size:>7.2f}{row.buffer_bytes / size:>8.2f}"
        )
    return "\n".join(lines)


def _rank(path: str) -> None:
    """One rank of `measured`."""
    import torch
    import torch.distributed as dist

    from engines.optional.aggregation.aggregate import aggregate
    from engines.runtime.world import join_world, leave_world

    world = join_world(timeout_s=60.0)
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    card = Path("/sys/class/net") / os.environ["GLOO_SOCKET_IFNAME"] / "statistics"

    def carried() -> int:
        return sum(int((card / name).read_text()) for name in ("rx_bytes", "tx_bytes"))

    def message(size: int, repeats: int = REPEATS) -> float:
        """From rank 0 to rank 1 and another one back, at once: seconds of the slower."""
        there, back, seconds = torch.zeros(size // 4), torch.zeros(size // 4), []
        peer = 1 - world.rank
        for _ in range(repeats):
            dist.barrier()
            began = time.perf_counter()
            if peer in (0, 1):
                ops = [dist.P2POp(dist.irecv, back, peer), dist.P2POp(dist.isend, there, peer)]
                for work in dist.batch_isend_irecv(ops):
                    work.wait()
                seconds.append(time.perf_counter() - began)
        slowest_s = torch.tensor(
            statistics.median(seconds) if seconds else 0.0, dtype=torch.float64
        )
        dist.all_reduce(slowest_s, dist.ReduceOp.MAX)
        return float(slowest_s)

    def one(kind: Aggregation, group: dist.ProcessGroup, size: int, devices: int) -> list[float]:
        """(seconds of the slowest rank, bytes of the busiest card)."""
        tensor, seconds = torch.ones(size // 4), []
        repeats = REPEATS * max(1, SIZES[1] // size)  # what is short is soon disturbed
        before = carried()
        for _ in range(repeats):
            dist.barrier(group)
            began = time.perf_counter()
            aggregate(tensor, group, kind=kind, per_node=per_node, devices=devices)
            seconds.append(time.perf_counter() - began)
        dist.barrier(group)  # nothing waits in a queue any more
        sent = (carried() - before) / repeats
        actual = torch.tensor([statistics.median(seconds), sent], dtype=torch.float64)
        dist.all_reduce(actual, dist.ReduceOp.MAX, group)
        return [float(value) for value in actual]

    message(SIZES[0])
    small, large = message(SIZES[0]), message(SIZES[-1])
    rate = (SIZES[-1] - SIZES[0]) / (large - small)
    line = {"latency_s": message(4, repeats=5 * REPEATS), "bytes_per_s": rate}
    times = []
    for ranks in (2, 3, 4) if per_node == 1 else (4,):
        group = dist.new_group(list(range(ranks)))
        if world.rank >= ranks:
            continue
        for kind, devices in _ways(ranks, per_node):
            for size in SIZES:
                seconds, sent = one(kind, group, size, devices)
                words = {"kind": kind.value, "devices": devices, "nodes": ranks // per_node}
                words |= {"ranks": ranks, "bytes": size, "seconds": seconds, "card_bytes": sent}
                times.append(words)
    dist.barrier()
    if world.rank == 0:
        Path(path).write_text(json.dumps({"line": line, "times": times}))
    leave_world()


def _ways(ranks: int, per_node: int) -> Iterator[tuple[Aggregation, int]]:
    if per_node > 1:
        yield from ((kind, 1) for kind in (Aggregation.RING, Aggregation.HIERARCHICAL))
        yield Aggregation.BACKEND, 1
        return
    for kind in Aggregation:
        if kind is not Aggregation.HIERARCHICAL:
            yield kind, 1
    if ranks > 2:
        yield Aggregation.GATHER, 2


def main() -> int:
    """The command."""
    return command(
        REPORT, about=__doc__, rank=_rank, measure=measure, repriced=repriced, table=table
    )


if __name__ == "__main__":
    sys.exit(main())
