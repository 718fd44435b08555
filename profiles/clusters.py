"""Clusters by name ("4x8xH100-SXM-80GB", "2xdgx-h100") and from TOML files.

A file says as little as it likes; what it leaves out comes from the catalogue:

    nodes = 4
    devices_per_node = 8
    accelerator = "H100-SXM-80GB"

    [inter]
    bandwidth = "400 Gbit/s"

Numbers carry their unit. A bandwidth is what large collectives achieve; to start from a card's
printed rate, name the card instead (`link = "ib-ndr-1x400"`, see catalogue/links.toml). A number
may also be a table that says where it is from:

    bandwidth = { value = "47 GB/s", source = "measured", relative_error = 0.1 }

Such a table is taken as it is; a bare number that is likely to mix up bits and bytes is refused
(profiles/mixups.py). Nodes of different kinds are tables of their own, with the keys of a file:

    [[node]]
    count = 2
    system = "dgx-h100"

    [[node]]
    system = "dgx-a100-80gb"

`network_cards`, `oversubscription`, `nodes_per_switch`, `[pair]` and `[host_bridge]` say how nodes
are wired: see `ClusterProfile`.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from profiles import catalogue, written
from profiles.cluster import (
    AxisFits,
    ClusterProfile,
    Collective,
    Device,
    Link,
    LinkFit,
    Overlap,
)
from profiles.cluster import HostBridge as Bridge
from profiles.cluster_names import parts_of_name
from profiles.cluster_text import to_toml
from profiles.errors import FileError, InputError, UnknownNameError
from profiles.mixed import slowest_of
from profiles.mixups import require_likely
from profiles.provenance import Quantity, Source
from profiles.record import Record, read_text
from profiles.units import parse_bytes

__all__ = [
    "cluster_from_name",
    "load_cluster",
    "resolve_cluster",
    "to_toml",
]

DTYPES = ("float64", "float32", "tfloat32", "float16", "bfloat16", "float8_e4m3fn")


class _FitTable(Record):
    latency: written.PlainTime
    bandwidth: written.PlainBandwidth
    relative_residual: NonNegativeFloat = 0.0


class _AxisTable(Record):
    group_size: Annotated[int, Field(ge=2)]
    stride: PositiveInt
    fits: dict[str, _FitTable] = Field(default_factory=dict)


class _OverlapTable(Record):
    computing: written.Factor
    communication: written.Factor


class _LinkTable(Record):
    link: str | None = None
    name: str | None = None
    bandwidth: written.Bandwidth = None
    latency: written.Time = None
    fits: dict[str, _FitTable] = Field(default_factory=dict)
    wiring: Literal["switch", "mesh"] | None = None


class _BridgeTable(_LinkTable):
    devices: PositiveInt | None = None
    peer_to_peer: bool = True


class _DeviceTable(Record):
    name: str | None = None
    kind: Literal["cuda", "cpu"] | None = None
    memory: written.Capacity = None
    memory_bandwidth: written.Bandwidth = None
    flop_rate: dict[str, written.FlopRate] | None = None
    matmul_fraction: written.Fraction = None
    launch: written.Time = None
    context: written.Memory = None
    matmul_efficiency: dict[PositiveInt, written.Factor] | None = None


class _ClusterTable(Record):
    """The keys of a cluster file."""

    name: str | None = None
    system: str | None = None
    accelerator: str | None = None
    nodes: PositiveInt = 1
    count: PositiveInt | None = None  # of nodes, in a table `[[node]]`
    node: list[_ClusterTable] = Field(default_factory=list)
    notes: tuple[str, ...] = ()
    devices_per_node: PositiveInt | None = None
    network_cards: PositiveInt | None = None
    oversubscription: Annotated[float, Field(ge=1)] = 1.0
    nodes_per_switch: PositiveInt | None = None
    pair: _LinkTable | None = None
    host_bridge: _BridgeTable | None = None
    host_memory: written.Memory = None
    cores: PositiveInt | None = None
    device: _DeviceTable | None = None
    intra: _LinkTable | None = None
    inter: _LinkTable | None = None
    overlap: _OverlapTable | None = None
    axes: list[_AxisTable] = Field(default_factory=list)


def resolve_cluster(text: str) -> ClusterProfile:
    """A cluster by name, or the path of a `.toml` or `.json` file.

    Raises:
        UnknownNameError: neither a known name nor a file.
        FileError, InputError: a file that cannot be read or used.
    """
    path = Path(text)
    if path.suffix == ".json":
        return ClusterProfile.load(path)
    if path.suffix == ".toml" or os.sep in text or path.is_file():
        return load_cluster(path)
    return cluster_from_name(text)


def cluster_from_name(text: str) -> ClusterProfile:
    """Nodes x devices x accelerator; one count is devices of one node, none is one device.

    Different nodes are joined by "+": "8xH100-SXM-80GB+8xA100-SXM-80GB" is two, and the slowest of
    each quantity counts.

    A system name (`dgx-h100`, `p5-48xlarge`) brings its own devices: "2xdgx-h100" is two nodes.
    What a bare accelerator leaves open is assumed and marked so: as many network cards, processor
    cores and bytes of main memory per device as the node it usually comes in (an H100: one 400
    Gbit/s card, as in a DGX H100), or one 100 Gbit/s Ethernet card a node where it comes in none.

    >>> cluster = cluster_from_name("4x8xH100-SXM-80GB")
    >>> cluster.world_size, cluster.inter.bandwidth_bytes_per_s.source.value
    (32, 'assumed')

    Raises:
        UnknownNameError: no such accelerator or system; the near miss is named.
        InputError: a count of 0, a short name that fits several, or nodes of unequal counts.
    """
    parts = parts_of_name(text)
    single = text.strip() if len(parts) == 1 else None
    tables = [_ClusterTable(name=single, **asdict(part)) for part in parts]
    return _together(tables, name=text.strip(), places=[None] * len(parts))


def load_cluster(path: str | os.PathLike[str]) -> ClusterProfile:
    """Read a cluster file.

    Raises:
        FileError: missing, unreadable, or not TOML.
        InputError: an unknown key or accelerator (near miss named), a number without a unit, a
            value that is missing; `where` is the file and the path of the key.
    """
    where = str(path)
    try:
        data = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise FileError(f"not TOML: {error}", where=where) from None
    cluster = _read(_ClusterTable.build(data, where=where), where)
    require_likely(data, where=where)
    return cluster


def _read(table: _ClusterTable, where: str) -> ClusterProfile:
    if table.node:
        places = [f"{where}: node.{index}" for index in range(len(table.node))]
        kinds = [_of_kind(table, *node) for node in zip(table.node, places, strict=True)]
        return _together(kinds, name=table.name or "", places=places)
    if table.count is not None:
        raise UnknownNameError("key", "count", ["nodes"], where=where)
    return _assemble(table, where=where)


def _of_kind(whole: _ClusterTable, node: _ClusterTable, where: str) -> _ClusterTable:
    """A `[[node]]` table as a file of its own: what it leaves out, the file says for all nodes."""
    if node.node or "nodes" in node.model_fields_set or "nodes" in whole.model_fields_set:
        raise InputError(
            "nodes of several kinds are counted by `count` in each table `[[node]]`",
            where=where,
            hints=["leave `nodes` out, and write one `[[node]]` for each kind"],
        )
    own = {key: getattr(node, key) for key in node.model_fields_set}
    return whole.model_copy(update={"name": None, "node": [], **own, "nodes": node.count or 1})


def _together(
    tables: Sequence[_ClusterTable], *, name: str, places: Sequence[str | None]
) -> ClusterProfile:
    if len(tables) == 1:
        return _assemble(tables[0], where=places[0])
    counts = [table.nodes for table in tables]
    kinds = [
        _assemble(table, where=where, num_nodes=sum(counts))
        for table, where in zip(tables, places, strict=True)
    ]
    return slowest_of(kinds, nodes=counts, name=name)


def _assemble(
    table: _ClusterTable, *, where: str | None, num_nodes: int | None = None
) -> ClusterProfile:
    """The profile of one kind of node; `num_nodes` counts those of other kinds too."""
    num_nodes = num_nodes or table.nodes
    system_name = None
    if table.system is not None:
        titles = {key: entry.title for key, entry in catalogue.systems().items()}
        system_name = catalogue.find_name(
            "system", table.system, titles, where=_at(where, "system")
        )
    system = catalogue.systems()[system_name] if system_name else None
    if table.accelerator is not None and system is not None:
        raise InputError(
            f"`{system_name}` brings its own devices, {system.accelerator}",
            where=_at(where, "accelerator"),
            hints=["leave `accelerator` out, or `system`"],
        )
    accelerator = table.accelerator or (system.accelerator if system else None)
    if accelerator is not None:
        accelerator = catalogue.find_name(
            "accelerator", accelerator, catalogue.accelerators(), where=_at(where, "accelerator")
        )
    device = _device(accelerator, table.device, where)
    per_node = table.devices_per_node or (system.devices if system else 1)
    entry = catalogue.accelerators()[accelerator] if accelerator else None
    usual = catalogue.systems()[entry.system] if entry and entry.system else None

    intra = inter = None
    if per_node > 1 or table.intra is not None:
        known = system.intra if system else entry.intra if entry else None
        intra = _link(table.intra, catalogue.link(known) if known else None, "intra", where)
    if num_nodes > 1 or table.inter is not None:
        if system is not None:
            default = catalogue.link(system.inter)
        else:
            default = catalogue.assumed_network(accelerator, per_node)
        inter = _link(table.inter, default, "inter", where)

    pair = _link(table.pair, None, "pair", where) if table.pair else None
    bridge = _bridge(table.host_bridge, intra, per_node, where) if table.host_bridge else None
    named = (table.inter.link if table.inter else None) or (system.inter if system else None)
    cards = table.network_cards
    if cards is None and inter is not None and named is not None:
        cards = catalogue.link_entry(named).cards

    host = table.host_memory
    cores = table.cores
    donor = system or usual
    if donor is not None and donor.memory is not None and host is None:
        host = Quantity(
            value=parse_bytes(donor.memory) * per_node // donor.devices,
            source=Source.DATASHEET if system else Source.ASSUMED,
            origin=f"{donor.source}, {donor.memory} for {donor.devices} devices",
        )
    if donor is not None and donor.cores is not None and cores is None:
        cores = max(1, donor.cores * per_node // donor.devices)
    return ClusterProfile(
        name=table.name or f"{table.nodes}x{per_node}x{device.name}",
        notes=table.notes,
        num_nodes=num_nodes,
        devices_per_node=per_node,
        network_cards=cards,
        oversubscription=table.oversubscription,
        nodes_per_switch=table.nodes_per_switch,
        pair=pair,
        host_bridge=bridge,
        device=device,
        intra=intra,
        inter=inter,
        host_memory_bytes=host,
        cores=cores,
        axes=tuple(
            AxisFits(
                group_size=axis.group_size,
                stride=axis.stride,
                fits=_fits(axis.fits, _at(where, f"axes.{index}.fits")),
            )
            for index, axis in enumerate(table.axes)
        ),
        overlap=Overlap.build(table.overlap.model_dump()) if table.overlap else None,
    )


def _device(accelerator: str | None, table: _DeviceTable | None, where: str | None) -> Device:
    """The catalogue's device with the file's numbers in place of its own, or the file's alone."""
    known = catalogue.accelerator(accelerator) if accelerator else None
    if table is None:
        if known is None:
            raise InputError(
                "`accelerator` is missing",
                where=where,
                hints=['write `accelerator = "H100-SXM-80GB"`, a `system`, or a `[device]` table'],
            )
        return known
    for dtype in table.flop_rate or ():
        if dtype not in DTYPES:
            raise UnknownNameError("dtype", dtype, DTYPES, where=_at(where, "device.flop_rate"))
    given = {
        "name": table.name,
        "kind": table.kind,
        "memory_bytes": table.memory,
        "memory_bandwidth_bytes_per_s": table.memory_bandwidth,
        "matmul_fraction": table.matmul_fraction,
        "launch_s": table.launch,
        "context_bytes": table.context,
        "matmul_efficiency": table.matmul_efficiency,
    }
    update: dict[str, object] = {key: value for key, value in given.items() if value is not None}
    if known is not None:
        update["flop_per_s"] = known.flop_per_s | (table.flop_rate or {})
        return known.model_copy(update=update)
    kind = table.kind or "cuda"
    if kind == "cuda":
        update = {"launch_s": catalogue.LAUNCH, "context_bytes": catalogue.CONTEXT} | update
    wanted = ["memory", "memory_bandwidth", "flop_rate"]
    wanted += ["launch", "context"] if kind != "cuda" else []
    missing = [f"device.{key}" for key in wanted if not getattr(table, key)]
    if missing:
        raise _missing(
            missing, where, hint="write it, or name an `accelerator` or `system` of the catalogue"
        )
    fraction = Quantity(
        value=catalogue.MATMUL_FRACTION,
        source=Source.ASSUMED,
        relative_error=catalogue.MATMUL_FRACTION_ERROR,
    )
    defaults: dict[str, object] = {"name": kind, "kind": kind, "matmul_fraction": fraction}
    return Device.build(defaults | update | {"flop_per_s": table.flop_rate}, where=where)


def _link(table: _LinkTable | None, default: Link | None, tier: str, where: str | None) -> Link:
    """The file's link; the catalogue's, by name or by default, lends what the file leaves out."""
    table = table or _LinkTable()
    named = None
    if table.link is not None:
        named = catalogue.link(table.link, where=_at(where, f"{tier}.link"))
    base = named or default
    bandwidth = table.bandwidth or (base.bandwidth_bytes_per_s if base else None)
    latency = table.latency or (base.latency_s if base else None)
    if bandwidth is None or latency is None:
        given = {"bandwidth": bandwidth, "latency": latency}
        raise _missing(
            [f"{tier}.{key}" for key, value in given.items() if value is None],
            where,
            hint=f'write them in a table `[{tier}]`, or name a `link` there: "nvlink4", "pcie4",'
            ' "ib-ndr-1x400" ...',
        )
    lent = named or (default if table.bandwidth is None else None)
    return Link(
        name=table.name or (lent.name if lent else tier),
        wiring=table.wiring or (base.wiring if base else "switch"),
        bandwidth_bytes_per_s=bandwidth,
        latency_s=latency,
        fits=_fits(table.fits, _at(where, f"{tier}.fits")),
    )


def _bridge(table: _BridgeTable, default: Link | None, per_node: int, where: str | None) -> Bridge:
    """Without rates of its own the way to the host is as fast as a device's."""
    usual = default.model_copy(update={"wiring": "switch"}) if default else None
    return Bridge(
        link=_link(table, usual, "host_bridge", where),
        devices=table.devices or per_node,
        peer_to_peer=table.peer_to_peer,
    )


def _fits(tables: Mapping[str, _FitTable], where: str | None) -> dict[Collective, LinkFit]:
    for collective in tables:
        if collective not in list(Collective):
            raise UnknownNameError("collective", collective, list(Collective), where=where)
    return {
        Collective(collective): LinkFit(
            latency_s=fit.latency,
            busbw_bytes_per_s=fit.bandwidth,
            relative_residual=fit.relative_residual,
        )
        for collective, fit in tables.items()
    }


def _missing(keys: list[str], where: str | None, *, hint: str) -> InputError:
    named = " and ".join(f"`{key}`" for key in keys)
    return InputError(
        f"{named} {'is' if len(keys) == 1 else 'are'} missing", where=where, hints=[hint]
    )


def _at(where: str | None, key: str) -> str | None:
    return f"{where}: {key}" if where else None
