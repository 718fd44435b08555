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
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveInt

from profiles import catalogue
from profiles.cluster import ClusterProfile, Collective, Device, Link, LinkFit
from profiles.cluster_text import to_toml
from profiles.errors import FileError, InputError, UnknownNameError, near_misses
from profiles.provenance import Quantity, Source
from profiles.record import Record, read_text
from profiles.units import (
    parse_bandwidth,
    parse_bytes,
    parse_flop_rate,
    parse_seconds,
)

__all__ = [
    "assumed_network",
    "cluster_from_name",
    "load_cluster",
    "resolve_cluster",
    "to_toml",
]

DTYPES = ("float64", "float32", "tfloat32", "float16", "bfloat16", "float8_e4m3fn")
# Nothing is known of the network of a cluster that is only named and whose accelerator comes in no
# usual node: what an office or cloud machine has.
FALLBACK_NETWORK = "ethernet-100"

_NAME = re.compile(r"(?:(\d+)x)?(?:(\d+)x)?(.+)", re.IGNORECASE)
_EXAMPLES = 'write "4x8xH100-SXM-80GB" (nodes x devices x accelerator), "2xdgx-h100" or a file'


def _quantity(parse: Callable[[str], float], data: object) -> object:
    """A written number, or a table with its source, as the fields of a `Quantity`."""
    if isinstance(data, Quantity) or data is None:
        return data
    fields: dict[str, object] = dict(data) if isinstance(data, dict) else {"value": data}
    value = fields.get("value")
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        fields["value"] = parse(str(value))
    return {"source": Source.USER} | fields


def _plain(parse: Callable[[str], float], data: object) -> object:
    is_number = isinstance(data, (str, int, float)) and not isinstance(data, bool)
    return parse(str(data)) if is_number else data


_Memory = Annotated[Quantity | None, BeforeValidator(partial(_quantity, parse_bytes))]
_Bandwidth = Annotated[Quantity | None, BeforeValidator(partial(_quantity, parse_bandwidth))]
_Time = Annotated[Quantity | None, BeforeValidator(partial(_quantity, parse_seconds))]
_Fraction = Annotated[Quantity | None, BeforeValidator(partial(_quantity, float))]
_FlopRate = Annotated[Quantity, BeforeValidator(partial(_quantity, parse_flop_rate))]


class _FitTable(Record):
    latency: Annotated[NonNegativeFloat, BeforeValidator(partial(_plain, parse_seconds))]
    bandwidth: Annotated[float, BeforeValidator(partial(_plain, parse_bandwidth))]
    relative_residual: NonNegativeFloat = 0.0


class _LinkTable(Record):
    link: str | None = None
    name: str | None = None
    bandwidth: _Bandwidth = None
    latency: _Time = None
    fits: dict[str, _FitTable] = Field(default_factory=dict)


class _DeviceTable(Record):
    name: str | None = None
    kind: Literal["cuda", "cpu"] | None = None
    memory: _Memory = None
    memory_bandwidth: _Bandwidth = None
    flop_rate: dict[str, _FlopRate] | None = None
    matmul_fraction: _Fraction = None
    launch: _Time = None
    context: _Memory = None


class _ClusterTable(Record):
    """The keys of a cluster file."""

    name: str | None = None
    system: str | None = None
    accelerator: str | None = None
    nodes: PositiveInt = 1
    devices_per_node: PositiveInt | None = None
    host_memory: _Memory = None
    cores: PositiveInt | None = None
    device: _DeviceTable | None = None
    intra: _LinkTable | None = None
    inter: _LinkTable | None = None


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

    A system name (`dgx-h100`, `p5-48xlarge`) brings its own devices: "2xdgx-h100" is two nodes.
    What a bare accelerator leaves open is assumed and marked so: as many network cards, processor
    cores and bytes of main memory per device as the node it usually comes in (an H100: one 400
    Gbit/s card, as in a DGX H100), or one 100 Gbit/s Ethernet card a node where it comes in none.

    >>> cluster = cluster_from_name("4x8xH100-SXM-80GB")
    >>> cluster.world_size, cluster.inter.bandwidth_bytes_per_s.source.value
    (32, 'assumed')

    Raises:
        UnknownNameError: no such accelerator or system; the near miss is named.
        InputError: a count of 0, or a short name that fits several.
    """
    match = _NAME.fullmatch(text.strip())
    if match is None:
        raise InputError("the cluster has no name", hints=[_EXAMPLES])
    name = match[3]
    numbers = [int(count) for count in match.group(1, 2) if count is not None]
    if 0 in numbers:
        raise InputError(f"cluster `{text}` has no devices", hints=[_EXAMPLES])
    system = _system_named(name)
    if system is None:
        nodes, devices = [1, 1, *numbers][-2:]
        accelerator = _accelerator_named(name, text)
        return _assemble(
            _ClusterTable(
                name=text.strip(), nodes=nodes, devices_per_node=devices, accelerator=accelerator
            ),
            where=None,
        )
    if len(numbers) > 1:
        entry = catalogue.systems()[system]
        raise InputError(
            f"cluster `{text}` counts devices, but `{system}` already has {entry.devices}",
            hints=[f"write `{numbers[0]}x{system}` for {numbers[0]} nodes"],
        )
    nodes = numbers[0] if numbers else 1
    return _assemble(_ClusterTable(name=text.strip(), nodes=nodes, system=system), where=None)


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
    return _assemble(_ClusterTable.build(data, where=where), where=where)


def _system_named(name: str) -> str | None:
    """Systems are asked for by their whole name, so that "h100" stays an accelerator."""
    for key, entry in catalogue.systems().items():
        if name.lower() in (key, entry.title.lower()):
            return key
    return None


def _accelerator_named(name: str, text: str) -> str:
    try:
        return catalogue.find_name("accelerator", name, catalogue.accelerators())
    except UnknownNameError as error:
        names = [*catalogue.accelerators(), *catalogue.systems()]
        short = {accelerator.split("-")[0] for accelerator in catalogue.accelerators()}
        if near_misses(name, short):
            names = sorted(short)  # "H1000": nearer to H100 than to any whole name
        where = f"cluster `{text}`" if text != name else None
        raise UnknownNameError(
            "accelerator", error.name, names, where=where, hints=[_EXAMPLES]
        ) from None


def _assemble(table: _ClusterTable, *, where: str | None) -> ClusterProfile:
    system_name = None
    if table.system is not None:
        titles = {key: entry.title for key, entry in catalogue.systems().items()}
        system_name = catalogue.find_name(
            "system", table.system, titles, where=_at(where, "system")
        )
    system = catalogue.systems()[system_name] if system_name else None
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
    if table.nodes > 1 or table.inter is not None:
        if system is not None:
            default = catalogue.link(system.inter)
        else:
            default = assumed_network(accelerator, per_node)
        inter = _link(table.inter, default, "inter", where)

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
        num_nodes=table.nodes,
        devices_per_node=per_node,
        device=device,
        intra=intra,
        inter=inter,
        host_memory_bytes=host,
        cores=cores,
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
    if bandwidth.value <= 0:
        raise InputError("a link needs a bandwidth above 0", where=_at(where, f"{tier}.bandwidth"))
    for collective in table.fits:
        if collective not in list(Collective):
            raise UnknownNameError(
                "collective", collective, list(Collective), where=_at(where, f"{tier}.fits")
            )
    lent = named or (default if table.bandwidth is None else None)
    return Link(
        name=table.name or (lent.name if lent else tier),
        bandwidth_bytes_per_s=bandwidth,
        latency_s=latency,
        fits={
            Collective(collective): LinkFit(
                latency_s=fit.latency,
                busbw_bytes_per_s=fit.bandwidth,
                relative_residual=fit.relative_residual,
            )
            for collective, fit in table.fits.items()
        },
    )


def assumed_network(accelerator: str | None, devices_per_node: int) -> Link:
    """The network of nodes that nobody described: see `cluster_from_name`."""
    entry = catalogue.accelerators().get(accelerator or "")
    usual = catalogue.systems()[entry.system] if entry and entry.system else None
    if usual is None:
        link, share = catalogue.link(FALLBACK_NETWORK), 1.0
        reason = f"assumed: one {link.name} card a node"
    else:
        link, share = catalogue.link(usual.inter), devices_per_node / usual.devices
        reason = f"assumed: as many network cards a device as {usual.title}"
    bandwidth = link.bandwidth_bytes_per_s.model_copy(
        update={
            "value": link.bandwidth_bytes_per_s.value * share,
            "source": Source.ASSUMED,
            "origin": f"{reason}; {link.bandwidth_bytes_per_s.origin}",
        }
    )
    return link.model_copy(update={"bandwidth_bytes_per_s": bandwidth})


def _missing(keys: list[str], where: str | None, *, hint: str) -> InputError:
    named = " and ".join(f"`{key}`" for key in keys)
    return InputError(
        f"{named} {'is' if len(keys) == 1 else 'are'} missing", where=where, hints=[hint]
    )


def _at(where: str | None, key: str) -> str | None:
    return f"{where}: {key}" if where else None
