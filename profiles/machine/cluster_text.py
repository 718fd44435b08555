"""A cluster profile as a TOML file that people read and edit; `profiles.machine.clusters` reads it
back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from profiles.machine.cluster import ClusterProfile, Link, LinkFit
from profiles.provenance import Quantity, Source
from profiles.units import (
    GIB,
    KIB,
    MIB,
    parse_bandwidth,
    parse_bytes,
    parse_flop_rate,
    parse_seconds,
    parse_watts,
)

_BYTES = (("GiB", GIB), ("MiB", MIB), ("KiB", KIB), ("B", 1))
_RATES = (("GB/s", 1e9), ("MB/s", 1e6), ("B/s", 1.0))
_FLOPS = (("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("FLOP/s", 1.0))
_TIMES = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
_WATTS = (("W", 1.0),)
_Units = tuple[tuple[str, float], ...]


def to_toml(cluster: ClusterProfile) -> str:
    """The file that `load_cluster` reads back to an equal profile; bytes are whole."""
    return "\n".join(_lines(cluster)) + "\n"


def _lines(cluster: ClusterProfile) -> Iterator[str]:
    yield "# A cluster, for `--cluster`. `relative_error` is half the width of a number's range, as"
    yield "# a fraction of it. Sources, most trusted first: measured on these machines; derived"
    yield '# from other facts; datasheet (printed or published); assumed; "you", who wrote it.'
    yield "# Counts are counted, and `fits` measured, unless you wrote them."
    yield ""
    yield f"name = {_text(cluster.name)}"
    yield f"nodes = {cluster.num_nodes}"
    yield f"devices_per_node = {cluster.devices_per_node}"
    if cluster.nodes_per_domain > 1:
        yield f"nodes_per_domain = {cluster.nodes_per_domain}  # joined by the links in the node"
    if cluster.network_cards is not None:
        yield f"network_cards = {cluster.network_cards}  # of a node"
    if cluster.oversubscription > 1:
        yield f"oversubscription = {cluster.oversubscription!r}  # of the switch between nodes"
    if cluster.nodes_per_switch is not None:
        yield f"nodes_per_switch = {cluster.nodes_per_switch}"
    if cluster.host_memory_bytes is not None:
        yield f"host_memory = {_written(cluster.host_memory_bytes, parse_bytes, _BYTES)}"
    if cluster.cores is not None:
        yield f"cores = {cluster.cores}"
    if cluster.disk_write_bytes_per_s is not None:
        rate = _written(cluster.disk_write_bytes_per_s, parse_bandwidth, _RATES)
        yield f"disk_write = {rate}  # of a node, in the folder that was named"
    if cluster.disk_read_bytes_per_s is not None:
        yield f"disk_read = {_written(cluster.disk_read_bytes_per_s, parse_bandwidth, _RATES)}"
    if cluster.disk_free_bytes is not None:
        free = _written(cluster.disk_free_bytes, parse_bytes, _BYTES)
        yield f"disk_free = {free}  # when it was looked at"
    if cluster.notes:
        yield "notes = ["
        yield from (f"    {_text(note)}," for note in cluster.notes)
        yield "]"
    device = cluster.device
    yield ""
    yield "# One device, or one CPU rank's share of a machine."
    yield "[device]"
    yield f"name = {_text(device.name)}"
    yield f"kind = {_text(device.kind)}"
    yield f"memory = {_written(device.memory_bytes, parse_bytes, _BYTES, plain=False)}"
    rate = _written(device.memory_bandwidth_bytes_per_s, parse_bandwidth, _RATES, plain=False)
    yield f"memory_bandwidth = {rate}"
    yield f"matmul_fraction = {_written(device.matmul_fraction, float, ())}"
    yield f"launch = {_written(device.launch_s, parse_seconds, _TIMES)}"
    yield f"context = {_written(device.context_bytes, parse_bytes, _BYTES)}"
    if device.board_power_w is not None:
        yield f"board_power = {_written(device.board_power_w, parse_watts, _WATTS)}"
    if device.host_link_bytes_per_s is not None:
        yield f"host_link = {_written(device.host_link_bytes_per_s, parse_bandwidth, _RATES)}"
    if device.new_memory_bytes_per_s is not None:
        yield f"new_memory = {_written(device.new_memory_bytes_per_s, parse_bandwidth, _RATES)}"
    yield ""
    yield "[device.flop_rate]"
    for dtype, quantity in device.flop_per_s.items():
        key = dtype if dtype.isidentifier() and dtype.isascii() else _text(dtype)
        yield f"{key} = {_written(quantity, parse_flop_rate, _FLOPS)}"
    if device.matmul_efficiency:
        yield ""
        yield "# What an n x n x n matrix product reaches, as a share of what large ones do."
        yield "[device.matmul_efficiency]"
        for edge, quantity in device.matmul_efficiency.items():
            yield f"{edge} = {_written(quantity, float, ())}"
    for tier, between, link in (
        ("intra", "the devices of a node: one direction, per device", cluster.intra),
        ("inter", "nodes: one direction, all network cards of a node together", cluster.inter),
    ):
        yield ""
        yield f"# Between {between}."
        yield from _link_lines(tier, link) if link else _link_example(tier)
    if cluster.pair is not None:
        yield ""
        yield "# A bridge between devices 2i and 2i + 1 of a node."
        yield from _link_lines("pair", cluster.pair)
    bridge = cluster.host_bridge
    if bridge is not None:
        yield ""
        yield "# The way of a PCIe bridge to the host: one direction, all its devices together."
        yield from _link_lines(
            "host_bridge",
            bridge.link,
            f"devices = {bridge.devices}",
            f"peer_to_peer = {str(bridge.peer_to_peer).lower()}",
        )
    if cluster.overlap is not None:
        yield ""
        yield "# How many times longer each takes while computing and communication run at once."
        yield "[overlap]"
        yield f"computing = {_written(cluster.overlap.computing, float, ())}"
        yield f"communication = {_written(cluster.overlap.communication, float, ())}"
    shared = cluster.shared_cores
    if shared is not None:
        yield ""
        yield "# How many times faster a rank computes while the others that share its cores wait."
        yield "[shared_cores]"
        yield f"alone = {_written(shared.alone, float, ())}"
        yield f"across_nodes = {str(shared.across_nodes).lower()}"
    for axis in cluster.axes:
        yield ""
        yield f"# Groups of {axis.group_size} ranks, {axis.stride} apart, all of them at once."
        yield "[[axes]]"
        yield f"group_size = {axis.group_size}"
        yield f"stride = {axis.stride}"
        for collective, fit in axis.fits.items():
            yield f"fits.{collective.value} = {{ {', '.join(_fit_parts(fit))} }}"


def _link_lines(tier: str, link: Link, *more: str) -> Iterator[str]:
    yield f"[{tier}]"
    yield f"name = {_text(link.name)}"
    yield from more
    if link.wiring != "switch":
        yield f"wiring = {_text(link.wiring)}"
    rate = _written(link.bandwidth_bytes_per_s, parse_bandwidth, _RATES, plain=False)
    yield f"bandwidth = {rate}"
    yield f"latency = {_written(link.latency_s, parse_seconds, _TIMES)}"
    for collective, fit in link.fits.items():
        yield ""
        yield f"[{tier}.fits.{collective.value}]"
        yield from _fit_parts(fit)


def _fit_parts(fit: LinkFit) -> Iterator[str]:
    yield f"latency = {_text(_exact(fit.latency_s, parse_seconds, _TIMES))}"
    yield f"bandwidth = {_text(_exact(fit.busbw_bytes_per_s, parse_bandwidth, _RATES))}"
    yield f"relative_residual = {fit.relative_residual!r}"


def _link_example(tier: str) -> Iterator[str]:
    """Example of a link for more devices or nodes, as comments."""
    count, link = {"intra": ("devices_per_node", "nvlink4"), "inter": ("nodes", "ethernet-100")}[
        tier
    ]
    yield f"# There is one; with more {count} write the link's name in the catalogue, or its rates:"
    yield f"# [{tier}]"
    yield f'# link = "{link}"'
    yield '# bandwidth = "10 GB/s"'
    yield '# latency = "20 us"'


def _written(
    quantity: Quantity, parse: Callable[[str], float], units: _Units, *, plain: bool = True
) -> str:
    """Without its source where that is the user; `plain`: where a bare number is not questioned."""
    value = _text(_exact(quantity.value, parse, units)) if units else repr(quantity.value)
    parts = [f"value = {value}", f"source = {_text(quantity.source.value)}"]
    if quantity.relative_error:
        parts.append(f"relative_error = {quantity.relative_error!r}")
    if quantity.origin:
        parts.append(f"origin = {_text(quantity.origin)}")
    is_plain = plain and len(parts) == 2 and quantity.source is Source.USER
    return value if is_plain else "{ " + ", ".join(parts) + " }"


def _exact(value: float, parse: Callable[[str], float], units: _Units) -> str:
    """The shortest text in the largest unit that fits; it parses back to the very same number."""
    fitting = [(unit, scale) for unit, scale in units if value >= scale] or [units[-1]]
    unit, scale = fitting[0]
    for digits in range(1, 18):
        text = f"{value / scale:.{digits}g}"
        if "e" not in text and parse(f"{text} {unit}") == value:
            return f"{text} {unit}"
    base = next(unit for unit, scale in units if scale == 1)
    return f"{value!r} {base}"


def _text(value: str) -> str:
    """A TOML basic string: JSON's escapes, and DEL, which TOML alone forbids."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
