"""Machines of a row: catalogue entries for its names of devices and links.

A table's names are looser than ours ("V100-SXM3-32GB", "PCIe4 (bridge not stated)", "RoCE 1600Gb/s
per node"). The device decides by its words and its printed memory; links by kind and rate.
"""

from __future__ import annotations

import re
from functools import lru_cache

from advisor.predict.rows import TableRow
from profiles.errors import InputError, UnknownNameError
from profiles.machine import catalogue
from profiles.machine.cluster import ClusterProfile, HostBridge, Link
from profiles.provenance import Quantity, Source

# One NVLink switch joins the 72 devices of a rack of compute trays with four each (NVL72).
RACK = 72
# A network's kind follows from its name; if the catalogue has no link of its rate, the bandwidth
# efficiency of this one is used.
_KINDS = (
    (r"tcpxo", "gcp-tcpxo"),
    (r"tcpx", "gcp-tcpx"),
    (r"efa", "efa-v2"),
    (r"slingshot", "slingshot-4x200"),
    (r"omni-?path|\bopa\b", "opa-4x100"),
    (r"roce", "roce-8x400"),
    (r"\bib\b|infiniband|ndr|hdr|edr|xdr", "ib-hdr-8x200"),
    (r"ethernet|\beth\b|tcp", "ethernet-100"),
)
_INSIDE = (r"nvlink\s*[1-5]", r"pcie\s*[3-6]")
"""Links inside a node; without the spaces they are the catalogue's names."""


def accelerator_of(name: str, memory_gb: float | None) -> str:
    """Return the catalogue name of the device that a table calls `name`.

    Raises:
        UnknownNameError: none fits.
    """
    known = catalogue.accelerators()
    plain = re.sub(r"\(.*?\)", "", name).strip()
    try:
        return catalogue.find_name("accelerator", plain, known)
    except InputError:
        pass
    # Drop words one by one, so that an unknown form factor does not hide the chip; memory, then
    # form factor, select the variant.
    words = [word for word in re.split(r"[^A-Za-z0-9.]+", plain) if word]
    chip = next((word for word in words if re.search(r"\d", word)), "")
    fitting = [full for full in known if chip and chip.lower() in full.lower().split("-")]
    if not fitting:
        raise UnknownNameError("accelerator", name, known)
    if memory_gb:
        fitting.sort(key=lambda full: abs(_printed_gb(full) - memory_gb))
        fitting = [full for full in fitting if _printed_gb(full) == _printed_gb(fitting[0])]
    form = "sxm" if "sxm" in plain.lower() else "pcie" if "pcie" in plain.lower() else ""
    return min(fitting, key=lambda full: (form not in full.lower(), known[full].printed_memory))


def cluster_of(row: TableRow) -> tuple[ClusterProfile, tuple[str, ...]]:
    """Return the cluster of a row, and the assumptions made.

    Raises:
        UnknownNameError, InputError: the device is unknown, or its count is.
    """
    if row.gpu_type is None:
        raise InputError("`gpu_type` is blank", hints=["no device, no speed"])
    name = accelerator_of(row.gpu_type, row.gpu_mem_gb)
    world = row.n_gpus
    if world is None and row.dp is not None:
        world = row.dp * (row.tp or 1) * (row.pp or 1) * (row.cp or 1)
    if world is None:
        raise InputError("`n_gpus` is blank", hints=["no number of devices, no step"])
    return _cluster(
        name,
        world,
        row.gpus_per_node,
        (row.intra_link or "").lower(),
        (row.inter_link or "").lower(),
        row.inter_gbps_per_node,
    )


@lru_cache(maxsize=4096)
def _cluster(
    name: str, world: int, per_node: int | None, inside: str, between: str, gbps: float | None
) -> tuple[ClusterProfile, tuple[str, ...]]:
    entry = catalogue.accelerators()[name]
    assumed = []
    if per_node is None:
        system = catalogue.systems().get(entry.system or "")
        per_node = system.devices if system else 8
        assumed.append(f"{per_node} devices a node")
    domain = RACK if "nvl72" in inside else per_node
    domain = _largest_divisor(world, domain)
    nodes = world // domain
    intra = inter = pair = bridge = cards = None
    if domain > 1:
        intra = _inside(inside, entry.intra)
        if "bridge pair" in inside:
            intra, pair = catalogue.link(_pcie(entry.intra)), catalogue.link("nvlink-bridge")
        if "no p2p" in inside or (entry.runtime_name or "").startswith("GeForce RTX"):
            # The driver lets these reach each other through main memory only (but for bridges).
            bridge = HostBridge(link=intra, devices=domain, peer_to_peer=False)
    if nodes > 1:
        inter, cards, assumption = _between(between, gbps, name, domain, per_node)
        if assumption:
            assumed.append(assumption)
    cluster = ClusterProfile(
        name=f"{nodes}x{domain}x{name}",
        num_nodes=nodes,
        devices_per_node=domain,
        device=catalogue.in_cluster(catalogue.accelerator(name), intra, world=world),
        intra=intra,
        inter=inter,
        network_cards=cards,
        pair=pair,
        host_bridge=bridge,
        notes=(),
    )
    return cluster, tuple(assumed)


def _inside(text: str, usual: str) -> Link:
    if usual.startswith("nvlink") and "pcie" not in text:
        # "NVLink4" of an H800 has half the bandwidth: the device's own entry is more accurate.
        return catalogue.link(usual)
    named = next(filter(None, (re.search(pattern, text) for pattern in _INSIDE)), None)
    key = re.sub(r"\s", "", named[0]) if named else usual
    link = catalogue.link(key)
    if key.startswith("pcie") and re.search(r"x8\b", text):
        # Half of the lanes; where a table names two widths, the narrower one is in every ring.
        rate = link.bandwidth_bytes_per_s
        rate = rate.model_copy(update={"value": rate.value / 2})
        link = link.model_copy(update={"name": "PCIe x8", "bandwidth_bytes_per_s": rate})
    return link


def _between(
    text: str, gbps: float | None, name: str, domain: int, per_node: int
) -> tuple[Link, int | None, str]:
    """Return the network of a node of `domain` devices (`per_node` a chassis), its network cards,
    and an assumption."""
    rate = gbps
    cards = re.search(r"(\d+)\s*x\s*(\d+)\s*g", text)
    if rate is None and cards:
        rate = float(cards[1]) * float(cards[2])
    chassis = max(1, domain // per_node)
    kind = next((key for pattern, key in _KINDS if re.search(pattern, text)), None)
    if rate is None:
        link = catalogue.assumed_network(name, domain)
        return link, None, f"the network a {name} usually comes with"
    base = catalogue.link(kind or "ib-hdr-8x200")
    entry = catalogue.link_entry(kind or "ib-hdr-8x200")
    share, number = entry.achieved, int(cards[1]) if cards else entry.cards
    link = base.model_copy(
        update={
            "name": text or f"{rate:g} Gbit/s",
            "bandwidth_bytes_per_s": Quantity(
                value=rate * 1e9 / 8 * share * chassis,
                source=Source.ASSUMED,
                relative_error=base.bandwidth_bytes_per_s.relative_error,
                origin=f"{rate:g} Gbit/s a node, {share:g} of it as {base.name}",
            ),
        }
    )
    assumption = "" if kind else f"a network of {rate:g} Gbit/s that works as {base.name}"
    return link, number * chassis if number else None, assumption


def _pcie(usual: str) -> str:
    return usual if usual.startswith("pcie") else "pcie4"


def _printed_gb(full: str) -> float:
    return float(re.findall(r"[\d.]+", catalogue.accelerators()[full].printed_memory)[0])


def _largest_divisor(world: int, most: int) -> int:
    return next(size for size in range(min(world, most), 0, -1) if world % size == 0)
