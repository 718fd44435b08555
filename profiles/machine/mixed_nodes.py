"""Nodes of different kinds in one job: planned as if all had the slowest of each quantity.

A step waits for its slowest rank, and every rank has equal work: what counts is the least memory,
the slowest product, the narrowest link. The profile says so in its notes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from profiles.errors import InputError
from profiles.machine import catalogue
from profiles.machine.cluster import ClusterProfile, Collective, Device, HostBridge, Link, LinkFit
from profiles.provenance import Quantity
from profiles.units import format_bandwidth, format_flop_rate, format_gib

# What a device is mostly asked to multiply in: the first that all of them have decides whose share
# of its peak counts.
_Compared = tuple[str, Callable[[float], str], Callable[[ClusterProfile], float | None]]
_MAIN_DTYPES = ("bfloat16", "float16", "float32")


def slowest_of(
    profiles: Sequence[ClusterProfile], *, nodes: Sequence[int] | None = None, name: str = ""
) -> ClusterProfile:
    """One profile for nodes that were described apart.

    Args:
        profiles: one for each kind of node; or, without `nodes`, what each node of one job found,
            where each profile is of the whole job as that node sees it.
        nodes: how many nodes there are of each kind.
        name: of the result; by default the kinds, joined by "+".

    Raises:
        InputError: nodes with different counts of devices, devices that cannot be in one job, or
            profiles of jobs of different sizes.
    """
    if not profiles:
        raise InputError("no node was looked at: there is nothing to plan for")
    _require_alike(profiles, "number of devices", [p.devices_per_node for p in profiles])
    _require_alike(profiles, "kind of device", [p.device.kind for p in profiles])
    if nodes is None:
        _require_alike(profiles, "size of the job in nodes", [p.num_nodes for p in profiles])
    first = profiles[0]
    notes = tuple(dict.fromkeys(note for profile in profiles for note in profile.notes))
    if all(profile.model_copy(update={"name": first.name}) == first for profile in profiles):
        count = first.num_nodes if nodes is None else sum(nodes)
        return first.model_copy(update={"num_nodes": count, "name": name or first.name})
    bridges = [profile.host_bridge for profile in profiles if profile.host_bridge is not None]
    every_pair = all(profile.pair is not None for profile in profiles)
    merged = first.model_copy(
        update={
            "name": name or "+".join(dict.fromkeys(profile.name for profile in profiles)),
            "num_nodes": first.num_nodes if nodes is None else sum(nodes),
            "device": _device([profile.device for profile in profiles]),
            "intra": _link([profile.intra for profile in profiles]),
            "inter": _link([profile.inter for profile in profiles]),
            "pair": _link([profile.pair for profile in profiles]) if every_pair else None,
            "host_bridge": _bridge(bridges) if bridges else None,
            "nodes_per_domain": min(profile.nodes_per_domain for profile in profiles),
            "network_cards": _least([profile.network_cards for profile in profiles]),
            "nodes_per_switch": _least([profile.nodes_per_switch for profile in profiles]),
            "oversubscription": max(profile.oversubscription for profile in profiles),
            "host_memory_bytes": _smallest([profile.host_memory_bytes for profile in profiles]),
            "cores": _least([profile.cores for profile in profiles]),
            "axes": (),  # what was timed, was timed of one kind
            "overlap": None,
        }
    )
    device = catalogue.in_cluster(merged.device, merged.intra, world=merged.world_size)
    said = (*_said(profiles, merged, nodes), *notes)
    return merged.model_copy(update={"device": device, "notes": said})


def _require_alike(
    profiles: Sequence[ClusterProfile], what: str, values: Sequence[int | str]
) -> None:
    if len(set(values)) == 1:
        return
    listing = ", ".join(f"{value} ({p.name})" for value, p in zip(values, profiles, strict=True))
    hints = ["probe all nodes in the same job"] if "job" in what else []
    if what == "number of devices":
        least = min(int(value) for value in values)
        hints = [f"take {least} on every node, and leave the others out of the job"]
    raise InputError(
        f"all nodes need the same {what}, for all ranks get equal work: {listing}",
        where="nodes of different kinds",
        hints=hints,
    )


def _device(devices: Sequence[Device]) -> Device:
    """The slowest of each quantity; of speeds the product of peak and share that is reached."""
    shared = [d for d in devices[0].flop_per_s if all(d in other.flop_per_s for other in devices)]
    main = next((dtype for dtype in _MAIN_DTYPES if dtype in shared), None)
    if main is None:
        kinds = " and ".join(dict.fromkeys(device.name for device in devices))
        raise InputError(
            f"{kinds} have no dtype in common whose speed is known",
            where="nodes of different kinds",
        )

    base = min(devices, key=lambda device: _reached(device, main))
    share = base.matmul_fraction
    rates = {}
    for dtype in shared:
        slow = min(devices, key=lambda device: _reached(device, dtype))
        peak = slow.flop_per_s[dtype]
        if slow is not base:
            # Written for the share of `base`, so that the product is what `slow` reaches.
            peak = peak.model_copy(update={"value": _reached(slow, dtype) / share.value})
        rates[dtype] = peak
    return base.model_copy(
        update={
            "name": "+".join(dict.fromkeys(device.name for device in devices)),
            "memory_bytes": _smallest([device.memory_bytes for device in devices]),
            "memory_bandwidth_bytes_per_s": _smallest(
                [device.memory_bandwidth_bytes_per_s for device in devices]
            ),
            "flop_per_s": rates,
            "launch_s": max((device.launch_s for device in devices), key=attrgetter("value")),
            "context_bytes": max(
                (device.context_bytes for device in devices), key=attrgetter("value")
            ),
        }
    )


def _link(links: Sequence[Link | None]) -> Link | None:
    known = [link for link in links if link is not None]
    if not known:
        return None
    slow = min(known, key=attrgetter("bandwidth_bytes_per_s.value"))
    latency = max((link.latency_s for link in known), key=attrgetter("value"))
    wiring = "mesh" if any(link.wiring == "mesh" for link in known) else "switch"
    fits: dict[Collective, LinkFit] = {}
    for kind in slow.fits:
        of_kind = [link.fits[kind] for link in known if kind in link.fits]
        if len(of_kind) == len(known):
            fits[kind] = LinkFit(
                latency_s=max(fit.latency_s for fit in of_kind),
                busbw_bytes_per_s=min(fit.busbw_bytes_per_s for fit in of_kind),
                relative_residual=max(fit.relative_residual for fit in of_kind),
            )
    return slow.model_copy(update={"latency_s": latency, "wiring": wiring, "fits": fits})


def _bridge(bridges: Sequence[HostBridge]) -> HostBridge:
    link = _link([bridge.link for bridge in bridges])
    assert link is not None
    return HostBridge(
        link=link,
        devices=max(bridge.devices for bridge in bridges),
        peer_to_peer=all(bridge.peer_to_peer for bridge in bridges),
    )


def _smallest(quantities: Sequence[Quantity | None]) -> Quantity | None:
    known = [quantity for quantity in quantities if quantity is not None]
    return min(known, key=attrgetter("value"), default=None)


def _least(counts: Sequence[int | None]) -> int | None:
    return min((count for count in counts if count is not None), default=None)


def _said(
    profiles: Sequence[ClusterProfile], merged: ClusterProfile, nodes: Sequence[int] | None
) -> list[str]:
    """One sentence on what the plan takes from which nodes."""
    counts = nodes or [1] * len(profiles)
    kinds: dict[str, int] = {}
    for profile, count in zip(profiles, counts, strict=True):
        kinds[profile.device.name] = kinds.get(profile.device.name, 0) + count
    main = next(dtype for dtype in _MAIN_DTYPES if dtype in merged.device.flop_per_s)
    quantities: tuple[_Compared, ...] = (
        ("memory", format_gib, lambda p: p.device.memory_bytes.value),
        ("speed", format_flop_rate, lambda p: _reached(p.device, main)),
        (
            "memory bandwidth",
            format_bandwidth,
            lambda p: p.device.memory_bandwidth_bytes_per_s.value,
        ),
        ("links in the node", format_bandwidth, lambda p: _rate(p.intra)),
        ("links between nodes", format_bandwidth, lambda p: _rate(p.inter)),
    )
    slowest: dict[str, list[str]] = {}
    for what, shown, value_of in quantities:
        values = [(value, p.device.name) for p in profiles if (value := value_of(p)) is not None]
        if len({value for value, _ in values}) > 1:
            value, whose = min(values)
            slowest.setdefault(whose, []).append(f"{what} {shown(value)}")
    who = " and ".join(f"{n} node{'s' if n > 1 else ''} of {kind}" for kind, n in kinds.items())
    what = "; ".join(f"of {whose} {', '.join(parts)}" for whose, parts in slowest.items())
    return [f"nodes differ ({who}): the slowest of each counts" + (f": {what}" if what else "")]


def _reached(device: Device, dtype: str) -> float:
    return device.flop_per_s[dtype].value * device.matmul_fraction.value


def _rate(link: Link | None) -> float | None:
    return link.bandwidth_bytes_per_s.value if link else None
