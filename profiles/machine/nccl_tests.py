"""Output of nccl-tests, parsed into fits and into a cluster.

The format is that of NVIDIA/nccl-tests, src/common.cu: a list of ranks with host and device, a
header that names the columns, a row for each size, and at the end `# Avg bus bandwidth`. RCCL's
fork prints the same. The `size` column is the whole tensor and `busbw` what PERFORMANCE.md there
defines, so both are as in `profiles.machine.cluster.Collective`.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from profiles.errors import FileError, InputError
from profiles.machine import catalogue
from profiles.machine.cluster import AxisFits, ClusterProfile, Collective, Link, LinkFit
from profiles.machine.clusters import cluster_from_name
from profiles.machine.link_fit import fit
from profiles.provenance import Quantity, Source
from profiles.record import read_text
from profiles.units import MIB

PROGRAMS = {
    "all_reduce_perf": Collective.ALL_REDUCE,
    "all_gather_perf": Collective.ALL_GATHER,
    "reduce_scatter_perf": Collective.REDUCE_SCATTER,
    "alltoall_perf": Collective.ALL_TO_ALL,
    "sendrecv_perf": Collective.SEND_RECV,
}
# What a ring sends at the link's rate; all-to-alls and sends have patterns of their own.
_RINGS = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
_RANK = re.compile(
    r"#\s+Rank\s+\d+\s+(?:Group\s+(?P<group>\d+)\s+)?Pid\s+\d+ on\s+(?P<host>\S+)"
    r" device\s+\d+ \[[^]]*\] (?P<device>.+)"
)
# What `mpirun --tag-output` puts before every line.
_MPI_TAG = re.compile(r"^\[\d+,\d+\]<std(?:out|err)>:\s?")
_PROGRAM = re.compile("|".join(PROGRAMS))
_ROW = re.compile(r"\s*\d+\s+\d+\s+\D")  # size, count, type
# Rates are printed with two decimals, times with three digits or more: a row's own numbers agree
# within the rounding of both.
_LAST_DIGIT, _TIME_ERROR = 0.005e9, 0.01
MOST_LOG_BYTES = 4 * MIB
"""A run over 10,000 ranks prints a tenth of it."""
_HOW = "write all of it to the file: `all_reduce_perf -b 1K -e 1G -f 4 > all_reduce_perf.log`"


@dataclass(frozen=True, slots=True)
class Log:
    """One program's run over all its ranks.

    Attributes:
        hosts: of each rank, in rank order.
        device: as the runtime names it.
        timings: (bytes, seconds), out of place.
    """

    where: str
    kind: Collective
    hosts: tuple[str, ...]
    device: str
    timings: tuple[tuple[int, float], ...]

    @property
    def ranks(self) -> int:
        return len(self.hosts)

    @property
    def num_nodes(self) -> int:
        return len(set(self.hosts))

    def fit(self) -> LinkFit:
        """The line through the out-of-place times.

        Raises:
            FileError: no line with a latency and a rate goes through them.
        """
        factor = self.kind.bus_factor(self.ranks)
        try:
            return fit([(factor * size, seconds) for size, seconds in self.timings])
        except (ValueError, ArithmeticError):
            raise FileError("these times have no latency and no rate", where=self.where) from None


def read_log(path: str | os.PathLike[str]) -> Log:
    """The output of one nccl-tests program.

    Which program it was, newer ones print; else the file's name has to tell.

    Raises:
        FileError: not such an output, or one that is cut, or has wrong results; with the line.
    """
    where, text = str(path), read_text(path, most=MOST_LOG_BYTES)
    lines = [_MPI_TAG.sub("", line) for line in text.splitlines()]
    header = next((i for i, line in enumerate(lines) if _is_header(line)), None)
    if header is None:
        what = "is empty" if not text.strip() else "is no output of nccl-tests"
        raise FileError(
            f"`{where}` {what}: it has no line `#  size  count  type ... time  algbw  busbw`",
            where=f"{where}, {len(lines)} lines",
            hints=[_HOW],
        )
    rows = [(i, line) for i, line in enumerate(lines, 1) if i > header and _ROW.match(line)]
    ends = [i for i, line in enumerate(lines, 1) if line.startswith("# Avg bus bandwidth")]
    if not ends:
        raise FileError(
            "the log is cut: it ends without `# Avg bus bandwidth`, so none of its"
            f" {len(rows)} rows is used",
            where=f"{where}, line {len(lines)}: {lines[-1].strip()[:60]!r}",
            hints=[_HOW],
        )
    if len(ends) > 1 or sum(map(_is_header, lines)) > 1:
        raise FileError(
            "the log holds several runs, a file is one", where=f"{where}, line {ends[-1]}"
        )
    hosts, device = _ranks(lines, where)
    kind = _kind(text, Path(path).name, where)
    sided = lines[header].split().count("busbw")
    timings = [_timing(row, kind, len(hosts), sided, f"{where}, line {i}") for i, row in rows]
    if len({size for size, _ in timings}) < 2:
        raise FileError(
            f"{len(timings)} size was timed, a line through latency and bandwidth needs two",
            where=f"{where}, line {ends[0]}",
            hints=["run it over sizes: `-b 1K -e 1G -f 4`"],
        )
    return Log(where, kind, hosts, device, tuple(timings))


def cluster_of_logs(paths: Sequence[str | os.PathLike[str]]) -> ClusterProfile:
    """The machines that the logs were made on, with their links as measured.

    Nodes, devices of a node and their name are those of the log with most ranks; a log of fewer
    ranks has to be of one whole node, or of as many ranks of one. Every log is the fit of its axis;
    those over all ranks of a node (`intra`) or over all ranks of several (`inter`) stand for the
    tier too. Memory, matrix products and what no log is about are those of the catalogue.

    Raises:
        FileError: a log that cannot be used; see `read_log`.
        InputError: logs of different devices, two of the same, or a device that the catalogue does
            not have.
    """
    logs = sorted((read_log(path) for path in paths), key=lambda log: log.ranks)
    largest = logs[-1]
    for log in logs:
        if log.device != largest.device:
            raise InputError(
                f"the logs are of different devices: {log.device} and {largest.device}",
                where=f"{log.where}\n{largest.where}",
            )
        twin = next(
            other
            for other in logs
            if (other.kind, other.ranks, other.num_nodes) == (log.kind, log.ranks, log.num_nodes)
        )
        if twin is not log:
            raise InputError(
                f"two logs of {log.kind.value} over {log.ranks} ranks: leave one out",
                where=f"{twin.where}\n{log.where}",
            )
    nodes, per_node = largest.num_nodes, largest.ranks // largest.num_nodes
    cluster = cluster_from_name(f"{nodes}x{per_node}x{_catalogue_name(largest)}")
    axes: dict[int, dict[Collective, LinkFit]] = {}
    intra: dict[Collective, LinkFit] = {}
    inter: dict[Collective, LinkFit] = {}
    for log in logs:
        if log.num_nodes > 1 and log.ranks != log.num_nodes * per_node:
            raise InputError(
                f"{log.ranks} ranks on {log.num_nodes} nodes are not all of their {per_node} each:"
                " such groups are no axis of a mesh",
                where=log.where,
            )
        fit = axes.setdefault(log.ranks, {})[log.kind] = log.fit()
        if log.num_nodes > 1:
            inter[log.kind] = fit
        elif log.ranks == per_node:
            intra[log.kind] = fit
    return cluster.model_copy(
        update={
            "name": f"{cluster.name} (nccl-tests)",
            "intra": _with_fits(cluster.intra, intra),
            "inter": _with_fits(cluster.inter, inter),
            "axes": tuple(
                AxisFits(group_size=ranks, stride=1, fits=fits)
                for ranks, fits in sorted(axes.items())
            ),
        }
    )


def _is_header(line: str) -> bool:
    words = line.split()
    return line.startswith("#") and words[1:4] == ["size", "count", "type"] and "busbw" in words


def _ranks(lines: Sequence[str], where: str) -> tuple[tuple[str, ...], str]:
    """Host of each rank, and the device that all of them are."""
    ranks = [match for line in lines if (match := _RANK.match(line.rstrip()))]
    if len(ranks) < 2:
        raise FileError(
            f"the log lists {len(ranks)} rank{'s' if len(ranks) != 1 else ''} (`#  Rank  0 ... on"
            " HOST device`): links need two",
            where=where,
            hints=["run it over several devices: `-g 8`, or under mpirun"],
        )
    if len({match["group"] for match in ranks}) > 1:
        raise FileError(
            "the ranks are split into several groups, whose ranks the log does not tell",
            where=where,
            hints=["run it without NCCL_TESTS_SPLIT"],
        )
    hosts, devices = [match["host"] for match in ranks], {match["device"] for match in ranks}
    counts = Counter(hosts)
    if len(set(counts.values())) > 1 or len(devices) > 1:
        per_host = ", ".join(f"{host}: {count}" for host, count in counts.items())
        raise FileError(
            f"nodes of unequal size or devices ({per_host}; {', '.join(sorted(devices))})",
            where=where,
        )
    return tuple(hosts), devices.pop()


def _kind(text: str, file: str, where: str) -> Collective:
    named = set(_PROGRAM.findall(text)) or set(_PROGRAM.findall(file))
    if len(named) != 1:
        reason = f"it names {' and '.join(sorted(named))}" if named else "it names none"
        raise FileError(
            f"which nccl-tests program this is has to be one of {', '.join(PROGRAMS)}; {reason}",
            where=where,
            hints=["name the file after the program: `all_gather_perf.log`"],
        )
    return PROGRAMS[named.pop()]


def _timing(row: str, kind: Collective, ranks: int, sided: int, where: str) -> tuple[int, float]:
    """Bytes and seconds of a row; its own numbers have to agree with the program's formula."""
    words = row.split()
    own = words[-4 * sided :][:4]  # out of place comes first
    try:
        size = int(words[0])
        microseconds, _, busbw = (float(word) for word in own[:3])
        seconds = microseconds / 1e6
        is_finite = math.isfinite(size) and math.isfinite(seconds) and math.isfinite(busbw)
        if len(words) < 4 * sided + 3 or not is_finite or seconds <= 0:
            raise ValueError
    except (ValueError, OverflowError):
        raise FileError(
            f"a row has size, count, type and then {sided} times the columns time, algbw, busbw and"
            f" #wrong; this one is {row.strip()!r}",
            where=where,
        ) from None
    if own[3] not in ("0", "N/A", "0e+00"):
        raise FileError(f"{own[3]} elements were wrong: such a run says nothing", where=where)
    expected = kind.bus_factor(ranks) * size / seconds
    slack = _LAST_DIGIT + _TIME_ERROR * expected
    if abs(busbw * 1e9 - expected) > slack:
        raise FileError(
            f"busbw {busbw:g} GB/s is not that of {kind.value} over {ranks} ranks:"
            f" {kind.bus_factor(ranks):.3g} x {size} B / {microseconds:g} us ="
            f" {expected / 1e9:.3g} GB/s",
            where=where,
            hints=["see that the file is named after the program that wrote it"],
        )
    return size, seconds


def _catalogue_name(log: Log) -> str:
    """The catalogue's name of a device whose memory the log does not tell."""
    fitting = [
        name
        for name, entry in catalogue.accelerators().items()
        if entry.runtime_name is not None
        and catalogue.accelerator_from_runtime(
            log.device, int(catalogue.accelerator(name).memory_bytes.value)
        )
        == name
    ]
    if len(fitting) != 1:
        what = (
            f"`{log.device}` fits {' and '.join(fitting)}"
            if fitting
            else f"the catalogue has no `{log.device}`"
        )
        raise InputError(
            what,
            where=log.where,
            hints=[
                "write a cluster.toml with the device, and the fits of "
                "`profiles.machine.nccl_tests`"
            ],
        )
    return fitting[0]


def _with_fits(link: Link | None, fits: dict[Collective, LinkFit]) -> Link | None:
    """`link` at the rate of its fastest ring collective; as it is where none was measured."""
    rings = [fit for kind, fit in fits.items() if kind in _RINGS]
    if link is None or not rings:
        return link.model_copy(update={"fits": fits}) if link else None
    rates = [fit.busbw_bytes_per_s for fit in rings]
    residual = max(fit.relative_residual for fit in rings)
    bandwidth = Quantity(
        value=max(rates),
        source=Source.MEASURED,
        relative_error=min(0.95, max(1 - min(rates) / max(rates), residual)),
        origin="nccl-tests",
    )
    return link.model_copy(update={"bandwidth_bytes_per_s": bandwidth, "fits": fits})
