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
(profiles/machine/unit_mistakes.py). Nodes of different kinds are tables of their own, with the keys
of a file:

    [[node]]
    count = 2
    system = "dgx-h100"

    [[node]]
    system = "dgx-a100-80gb"

`network_cards`, `oversubscription`, `nodes_per_switch`, `nodes_per_domain`, `[pair]` and
`[host_bridge]` say how nodes are wired: see `ClusterProfile`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from profiles.errors import InputError, UnknownNameError
from profiles.machine import catalogue
from profiles.machine.cluster import AxisFits, ClusterProfile
from profiles.machine.cluster_names import parts_of_name
from profiles.machine.cluster_parts import at, bridge_of, device_of, fits_of, link_of
from profiles.machine.cluster_tables import ClusterTable
from profiles.machine.cluster_text import to_toml
from profiles.machine.mixed_nodes import slowest_of
from profiles.machine.unit_mistakes import require_likely
from profiles.provenance import Quantity, Source
from profiles.record import read_text, toml_table
from profiles.units import parse_bytes

__all__ = [
    "cluster_from_name",
    "load_cluster",
    "resolve_cluster",
    "to_toml",
]


def resolve_cluster(text: str) -> ClusterProfile:
    """A cluster by name, or the path of a `.toml` or `.json` file.

    Raises:
        UnknownNameError: neither a known name nor a file.
        FileError, InputError: a file that cannot be read or used.
    """
    path = Path(text)
    if path.suffix == ".json":
        cluster = ClusterProfile.load(path)
        _require_links(cluster, where=text)
        return cluster
    if path.suffix == ".toml" or os.sep in text or os.path.isfile(text):
        return load_cluster(path)
    return cluster_from_name(text)


def _require_links(cluster: ClusterProfile, *, where: str) -> None:
    """Refuse devices that nothing joins: a saved profile says all, and nothing lends it a link."""
    for name, link, count in (
        ("intra", cluster.intra, cluster.domain_devices),
        ("inter", cluster.inter, cluster.num_domains),
    ):
        if link is None and count > 1:
            joined = "devices of a node" if name == "intra" else "nodes"
            raise InputError(
                f"`{name}` is null, and {count:,} {joined} are joined by it",
                where=where,
                hints=["write the cluster as TOML: what it leaves out comes from the catalogue"],
            )


def cluster_from_name(text: str) -> ClusterProfile:
    """Nodes x devices x accelerator; one count is devices of one node, none is one device.

    Different nodes are joined by "+": "8xH100-SXM-80GB+8xA100-SXM-80GB" is two, and the slowest of
    each quantity counts.

    Of an accelerator whose nodes are joined by its own links (GB200 NVL72: 18 nodes of four on one
    NVLink switch) one count is devices of one domain: "72xGB200" is 18 nodes of four, "2x72xGB200"
    two racks.

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
    tables = [ClusterTable(name=single, **asdict(part)) for part in parts]
    return _together(tables, name=text.strip(), places=[None] * len(parts))


def load_cluster(path: str | os.PathLike[str]) -> ClusterProfile:
    """Read a cluster file.

    Raises:
        FileError: missing, unreadable, or not TOML.
        InputError: an unknown key or accelerator (near miss named), a number without a unit, a
            value that is missing; `where` is the file and the path of the key.
    """
    where = str(path)
    data = toml_table(read_text(path), where=where)
    cluster = _read(ClusterTable.build(data, where=where), where)
    require_likely(data, where=where)
    return cluster


def _read(table: ClusterTable, where: str) -> ClusterProfile:
    if table.node:
        places = [f"{where}: node.{index}" for index in range(len(table.node))]
        kinds = [_of_kind(table, *node) for node in zip(table.node, places, strict=True)]
        return _together(kinds, name=table.name or "", places=places)
    if table.count is not None:
        raise UnknownNameError("key", "count", ["nodes"], where=where)
    return _assemble(table, where=where)


def _of_kind(whole: ClusterTable, node: ClusterTable, where: str) -> ClusterTable:
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
    tables: Sequence[ClusterTable], *, name: str, places: Sequence[str | None]
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
    table: ClusterTable, *, where: str | None, num_nodes: int | None = None
) -> ClusterProfile:
    """The profile of one kind of node; `num_nodes` counts those of other kinds too."""
    num_nodes = num_nodes or table.nodes
    system_name = None
    if table.system is not None:
        titles = {key: entry.title for key, entry in catalogue.systems().items()}
        system_name = catalogue.find_name("system", table.system, titles, where=at(where, "system"))
    system = catalogue.systems()[system_name] if system_name else None
    if table.accelerator is not None and system is not None:
        raise InputError(
            f"`{system_name}` brings its own devices, {system.accelerator}",
            where=at(where, "accelerator"),
            hints=["leave `accelerator` out, or `system`"],
        )
    accelerator = table.accelerator or (system.accelerator if system else None)
    if accelerator is not None:
        accelerator = catalogue.find_name(
            "accelerator", accelerator, catalogue.accelerators(), where=at(where, "accelerator")
        )
    device = device_of(accelerator, table.device, where)
    per_node = table.devices_per_node or (system.devices if system else 1)
    entry = catalogue.accelerators()[accelerator] if accelerator else None
    usual = catalogue.systems()[entry.system] if entry and entry.system else None

    intra = inter = None
    if per_node > 1 or table.intra is not None:
        known = system.intra if system else entry.intra if entry else None
        intra = link_of(table.intra, catalogue.link(known) if known else None, "intra", where)
    if num_nodes > 1 or table.inter is not None:
        if system is not None:
            default = catalogue.link(system.inter)
        else:
            default = catalogue.assumed_network(accelerator, per_node)
        inter = link_of(table.inter, default, "inter", where)

    pair = link_of(table.pair, None, "pair", where) if table.pair else None
    bridge = bridge_of(table.host_bridge, intra, per_node, where) if table.host_bridge else None
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
    values = {
        "name": table.name or f"{table.nodes}x{per_node}x{device.name}",
        "notes": table.notes,
        "num_nodes": num_nodes,
        "devices_per_node": per_node,
        "nodes_per_domain": table.nodes_per_domain or (donor.nodes_per_domain if donor else 1),
        "network_cards": cards,
        "oversubscription": table.oversubscription,
        "nodes_per_switch": table.nodes_per_switch,
        "pair": pair,
        "host_bridge": bridge,
        "device": catalogue.in_cluster(device, intra, world=num_nodes * per_node),
        "intra": intra,
        "inter": inter,
        "host_memory_bytes": host,
        "cores": cores,
        "disk_write_bytes_per_s": table.disk_write,
        "disk_read_bytes_per_s": table.disk_read,
        "disk_free_bytes": table.disk_free,
        "axes": tuple(
            AxisFits(
                group_size=axis.group_size,
                stride=axis.stride,
                fits=fits_of(axis.fits, at(where, f"axes.{index}.fits")),
            )
            for index, axis in enumerate(table.axes)
        ),
        "overlap": table.overlap,
        "shared_cores": table.shared_cores,
    }
    return ClusterProfile.build(values, where=where)
