"""Devices and links of a cluster file: its own numbers, and the catalogue's where it has none."""

from __future__ import annotations

from collections.abc import Mapping

from profiles.errors import InputError, UnknownNameError
from profiles.machine import catalogue
from profiles.machine.cluster import Collective, Device, HostBridge, Link, LinkFit
from profiles.machine.cluster_tables import BridgeTable, DeviceTable, FitTable, LinkTable
from profiles.provenance import Quantity, Source

DTYPES = ("float64", "float32", "tfloat32", "float16", "bfloat16", "float8_e4m3fn")


def device_of(accelerator: str | None, table: DeviceTable | None, where: str | None) -> Device:
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
            raise UnknownNameError("dtype", dtype, DTYPES, where=at(where, "device.flop_rate"))
    given = {
        "name": table.name,
        "kind": table.kind,
        "memory_bytes": table.memory,
        "memory_bandwidth_bytes_per_s": table.memory_bandwidth,
        "matmul_fraction": table.matmul_fraction,
        "launch_s": table.launch,
        "context_bytes": table.context,
        "board_power_w": table.board_power,
        "host_link_bytes_per_s": table.host_link,
        "new_memory_bytes_per_s": table.new_memory,
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


def link_of(table: LinkTable | None, default: Link | None, tier: str, where: str | None) -> Link:
    """The file's link; the catalogue's, by name or by default, lends what the file leaves out."""
    table = table or LinkTable()
    named = None
    if table.link is not None:
        named = catalogue.link(table.link, where=at(where, f"{tier}.link"))
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
        fits=fits_of(table.fits, at(where, f"{tier}.fits")),
    )


def bridge_of(
    table: BridgeTable, default: Link | None, per_node: int, where: str | None
) -> HostBridge:
    """Without rates of its own the way to the host is as fast as a device's."""
    usual = default.model_copy(update={"wiring": "switch"}) if default else None
    return HostBridge(
        link=link_of(table, usual, "host_bridge", where),
        devices=table.devices or per_node,
        peer_to_peer=table.peer_to_peer,
    )


def fits_of(tables: Mapping[str, FitTable], where: str | None) -> dict[Collective, LinkFit]:
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


def at(where: str | None, key: str) -> str | None:
    return f"{where}: {key}" if where else None
