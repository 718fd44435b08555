"""Facts from data sheets and published measurements: accelerators, links and whole nodes by name.

The numbers are in the three TOML files beside this one, written with units, each entry with its
source. What is the same for every accelerator is here.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import Literal, TypeVar

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from profiles.errors import InputError, UnknownNameError
from profiles.machine.cluster import Device, Link
from profiles.provenance import Quantity, Source
from profiles.record import Record, toml_table
from profiles.units import (
    parse_bandwidth,
    parse_bytes,
    parse_flop_rate,
    parse_seconds,
    parse_watts,
)

# Host time of a kernel of an eager step. The driver's part alone takes 7 us (AutoParallel,
# compute_estimation.py) and a processor's part 14 (`profiles.machine.bench.small_step` on one);
# three virtual machines took 34, 40 and 54 for both (tests/validation/gpu.json, gpu_h100.json):
# between the fastest and the slowest by ratio. A GPU at hand is timed.
LAUNCH = Quantity(
    value=33e-6,
    source=Source.ASSUMED,
    relative_error=0.6,
    origin="between a fast host's 20 us and a slow one's 54",
)
# CUDA context 0.47 (lazy) to 0.92 GiB and NCCL 1 to 2 GiB; 2.00 GiB after the first barrier
# (ml-engineering, measured with torch 2.1): 1.5 to 2.9 GiB in all.
CONTEXT = Quantity(
    value=2.0 * 2**30,
    source=Source.ASSUMED,
    relative_error=0.45,
    origin="ml-engineering: CUDA context 0.47-0.92 GiB, NCCL 1-2 GiB",
)
# The same without a process group, and where NCCL opens few channels: its buffers are so many MiB
# for each channel and peer, and beside NVLink there are up to 32 channels, over PCIe 2 to 4
# (nccl/src/graph/search.cc, connect.cc).
CONTEXT_ALONE = Quantity(
    value=0.8 * 2**30,
    source=Source.ASSUMED,
    relative_error=0.4,
    origin="ml-engineering: CUDA context 0.47-0.92 GiB; 0.8 to 1.1 on an H200",
)
CONTEXT_OVER_PCIE = Quantity(
    value=1.0 * 2**30,
    source=Source.ASSUMED,
    relative_error=0.45,
    origin="CUDA context 0.47-0.92 GiB, NCCL with few channels",
)
# A kernel of an eager step on a processor, with its module's call and its node of autograd.
CPU_LAUNCH = Quantity(
    value=15e-6, source=Source.ASSUMED, relative_error=0.6, origin="eager dispatch and autograd"
)
# The interpreter and torch: 0.3 to 0.4 GiB of a small training process (measured, torch 2.13).
CPU_CONTEXT = Quantity(
    value=358 * 2**20,
    source=Source.ASSUMED,
    relative_error=0.3,
    origin="interpreter and torch in a small training process",
)
# Share of the printed memory bandwidth that large streaming operations reach: 0.9 from 100 MB on
# (Calculon, systems/a100_80g.json), 0.7 on average over a model's operations (AutoParallel).
MEMORY_BANDWIDTH_FRACTION, MEMORY_BANDWIDTH_ERROR = 0.9, 0.2
# Share of the printed peak of parts nobody published a search for: NVIDIA parts reach 0.71 to 0.87
# (ml-engineering, bfloat16 and fp8).
MATMUL_FRACTION, MATMUL_FRACTION_ERROR = 0.78, 0.25
# Of published shares: fp8 and bfloat16 of one part differ by up to 12 % (H100 0.709 and 0.803).
MATMUL_PUBLISHED_ERROR = 0.15
# Torch's total over the printed figure as GiB: 0.915 (24 GB GDDR with error correction) to 1.0.
MEMORY_FRACTION, MEMORY_ERROR = 0.96, 0.05
# The lowest and highest totals seen of one part differ by up to 1.7 % (2080 Ti: 10.57, 10.75 GiB).
MEMORY_REPORTED_ERROR = 0.02
# Nothing is known of the network of a cluster that is only named and whose accelerator comes in no
# usual node: what an office or cloud machine has.
FALLBACK_NETWORK = "ethernet-100"


Entry = TypeVar("Entry", bound=Record)


class AcceleratorEntry(Record):
    """One table of accelerators.toml; its head explains the keys."""

    kind: Literal["cuda", "cpu"] = "cuda"
    runtime_name: str | None = None
    printed_memory: str
    memory: str | None = None
    memory_bandwidth: str
    board_power: str | None = None
    multiprocessors: PositiveInt | None = None
    flop_rate: dict[str, str]
    matmul_fraction: NonNegativeFloat | None = None
    matmul_source: Source = Source.ASSUMED
    intra: str
    system: str | None = None
    source: str


class LinkEntry(Record):
    """One table of links.toml; its head explains the keys."""

    title: str
    scope: Literal["intra", "inter", "host"]
    wiring: Literal["switch", "mesh"] = "switch"
    cards: PositiveInt | None = None
    nominal: str
    achieved: NonNegativeFloat
    achieved_source: Source
    achieved_error: NonNegativeFloat
    latency: str
    latency_source: Source
    latency_error: NonNegativeFloat
    source: str


class SystemEntry(Record):
    """One table of systems.toml: a node as it is sold or rented."""

    title: str
    accelerator: str
    devices: PositiveInt
    nodes_per_domain: PositiveInt = 1
    intra: str
    inter: str
    memory: str | None = None
    cores: PositiveInt | None = None
    host_speed: PositiveFloat = 1.0
    source: str


@functools.cache
def accelerators() -> Mapping[str, AcceleratorEntry]:
    return _read("accelerators.toml", AcceleratorEntry)


@functools.cache
def links() -> Mapping[str, LinkEntry]:
    return _read("links.toml", LinkEntry)


@functools.cache
def systems() -> Mapping[str, SystemEntry]:
    return _read("systems.toml", SystemEntry)


def accelerator(name: str, *, where: str | None = None) -> Device:
    """One device by its catalogue name, in any case, or by a shorter name that fits only one.

    >>> accelerator("h200").name
    'H200-SXM'

    Raises:
        UnknownNameError: no such accelerator; the near miss is named.
        InputError: a short name that fits several.
    """
    full = find_name("accelerator", name, accelerators(), where=where)
    entry = accelerators()[full]
    return Device(
        name=full,
        kind=entry.kind,
        memory_bytes=_memory(entry),
        memory_bandwidth_bytes_per_s=Quantity(
            value=MEMORY_BANDWIDTH_FRACTION * parse_bandwidth(entry.memory_bandwidth),
            source=Source.DATASHEET,
            relative_error=MEMORY_BANDWIDTH_ERROR,
            origin=f"{MEMORY_BANDWIDTH_FRACTION} of {entry.memory_bandwidth}, {entry.source}",
        ),
        flop_per_s={
            dtype: Quantity(
                value=parse_flop_rate(text), source=Source.DATASHEET, origin=entry.source
            )
            for dtype, text in entry.flop_rate.items()
        },
        matmul_fraction=_matmul_fraction(entry),
        launch_s=_launch(entry) if entry.kind == "cuda" else CPU_LAUNCH,
        context_bytes=CONTEXT if entry.kind == "cuda" else CPU_CONTEXT,
        board_power_w=_board_power(entry),
    )


def in_cluster(device: Device, intra: Link | None, *, world: int) -> Device:
    """`device` with the context of a process among `world`, where the catalogue's is assumed."""
    if device.context_bytes != CONTEXT:
        return device
    context = CONTEXT
    if world == 1:
        context = CONTEXT_ALONE
    elif intra is not None and intra.name.startswith("PCIe"):
        context = CONTEXT_OVER_PCIE
    return device.model_copy(update={"context_bytes": context})


def multiprocessors(name: str) -> int | None:
    """Of the accelerator with just this catalogue name; None where there is none, or nobody says.

    >>> multiprocessors("H200-SXM")
    132
    """
    entry = accelerators().get(name)
    return entry.multiprocessors if entry is not None else None


def link(name: str, *, where: str | None = None) -> Link:
    """A link by its catalogue name or title; the bandwidth is what large collectives achieve.

    >>> link("nvlink4").bandwidth_bytes_per_s.value
    369000000000.0

    Raises:
        UnknownNameError: no such link.
        InputError: a short name that fits several.
    """
    entry = link_entry(name, where=where)
    origin = f"{entry.achieved:.2f} of {entry.nominal} nominal: {entry.source}"
    return Link(
        name=entry.title,
        wiring=entry.wiring,
        bandwidth_bytes_per_s=Quantity(
            value=entry.achieved * parse_bandwidth(entry.nominal),
            source=entry.achieved_source,
            relative_error=entry.achieved_error,
            origin=origin,
        ),
        latency_s=Quantity(
            value=parse_seconds(entry.latency),
            source=entry.latency_source,
            relative_error=entry.latency_error,
            origin="one ring step: NCCL's constants and published small-message times",
        ),
    )


def link_entry(name: str, *, where: str | None = None) -> LinkEntry:
    """The table of links.toml that `link` reads."""
    titles = {key: entry.title for key, entry in links().items()}
    return links()[find_name("link", name, titles, where=where)]


def assumed_network(accelerator: str | None, devices_per_node: int) -> Link:
    """The network of nodes that nobody described: see `clusters.cluster_from_name`."""
    entry = accelerators().get(accelerator or "")
    usual = systems()[entry.system] if entry and entry.system else None
    if usual is None:
        network, share = link(FALLBACK_NETWORK), 1.0
        reason = f"assumed: one {network.name} card a node"
    else:
        network, share = link(usual.inter), devices_per_node / usual.devices
        reason = f"assumed: as many network cards a device as {usual.title}"
    bandwidth = network.bandwidth_bytes_per_s.model_copy(
        update={
            "value": network.bandwidth_bytes_per_s.value * share,
            "source": Source.ASSUMED,
            "origin": f"{reason}; {network.bandwidth_bytes_per_s.origin}",
        }
    )
    return network.model_copy(update={"bandwidth_bytes_per_s": bandwidth})


def accelerator_from_runtime(name: str, memory_bytes: int) -> str | None:
    """The catalogue name of what the runtime calls `name`, or None where none fits.

    A part sold with several memory sizes under one name fits only with the catalogue's size.
    """
    plain = _without_vendor(name)
    for full, entry in accelerators().items():
        if entry.runtime_name is None or _without_vendor(entry.runtime_name) != plain:
            continue
        known = _memory(entry)
        if abs(memory_bytes - known.value) <= 0.1 * known.value:
            return full
    return None


def find_name(
    kind: str, name: str, known: Mapping[str, object], *, where: str | None = None
) -> str:
    """The one key of `known` that `name` means.

    Tried in turn: the whole name; all its words, in any order; its first words run together. Words
    are what dashes, spaces and punctuation separate; case does not matter. Where the values are
    text (titles), their words count too.

    Raises:
        UnknownNameError: none.
        InputError: several.
    """
    wanted = name.strip().lower()
    titles = {key: str(value) if isinstance(value, str) else "" for key, value in known.items()}
    for key, title in titles.items():
        if wanted and wanted in (key.lower(), title.lower()):
            return key
    words = _words(wanted)
    matches = [key for key in known if words and words <= _words(f"{key} {titles[key]}")]
    if not matches:
        matches = [
            key for key in known if "".join(re.findall(r"[a-z0-9.]+", wanted)) in _heads(key)
        ]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise InputError(
            f"`{name}` can mean {len(matches)} {kind}s",
            where=where,
            hints=["write one of " + ", ".join(f"`{key}`" for key in matches)],
        )
    raise UnknownNameError(kind, name, known, where=where)


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9.]+", text.lower()))


def _heads(key: str) -> frozenset[str]:
    """The first words of a name run together: "RTX-3090-24GB" has "rtx", "rtx3090", ..."""
    return frozenset(itertools.accumulate(re.findall(r"[a-z0-9.]+", key.lower())))


def _without_vendor(name: str) -> str:
    """Drivers of different years print "Tesla T4" and "NVIDIA T4" for the same part."""
    words = name.lower().split()
    return " ".join(word for word in words if word not in {"nvidia", "amd", "tesla", "geforce"})


def _memory(entry: AcceleratorEntry) -> Quantity:
    if entry.memory is not None:
        return Quantity(
            value=parse_bytes(entry.memory),
            source=Source.DATASHEET,
            relative_error=MEMORY_REPORTED_ERROR,
            origin=f"total that torch reports in public logs; printed as {entry.printed_memory}",
        )
    as_binary = parse_bytes(entry.printed_memory.replace("GB", "GiB"))
    return Quantity(
        value=round(MEMORY_FRACTION * as_binary),
        source=Source.ASSUMED,
        relative_error=MEMORY_ERROR,
        origin=f"{MEMORY_FRACTION} of the printed {entry.printed_memory} read as GiB",
    )


def _board_power(entry: AcceleratorEntry) -> Quantity | None:
    if entry.board_power is None:
        return None
    return Quantity(
        value=parse_watts(entry.board_power),
        source=Source.DATASHEET,
        origin="printed maximum of the board",
    )


def _launch(entry: AcceleratorEntry) -> Quantity:
    """By the processor of the system that an accelerator usually comes in."""
    speed = systems()[entry.system].host_speed if entry.system else 1.0
    return LAUNCH.model_copy(update={"value": LAUNCH.value / speed})


def _matmul_fraction(entry: AcceleratorEntry) -> Quantity:
    if entry.matmul_fraction is None:
        return Quantity(
            value=MATMUL_FRACTION,
            source=Source.ASSUMED,
            relative_error=MATMUL_FRACTION_ERROR,
            origin="NVIDIA parts reach 0.71-0.87 of the sheet (ml-engineering)",
        )
    published = entry.matmul_source is Source.DATASHEET
    return Quantity(
        value=entry.matmul_fraction,
        source=entry.matmul_source,
        relative_error=MATMUL_PUBLISHED_ERROR if published else MATMUL_FRACTION_ERROR,
        origin="ml-engineering, maximum achievable matmul" if published else entry.source,
    )


def _read(file: str, kind: type[Entry]) -> Mapping[str, Entry]:
    text = resources.files(__name__).joinpath(file).read_text(encoding="utf-8")
    tables = toml_table(text, where=file)
    return MappingProxyType(
        {name: kind.build(table, where=f"{file}: {name}") for name, table in tables.items()}
    )
