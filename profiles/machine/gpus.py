"""The GPUs that this process sees, and what joins them; timed where nobody published them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from profiles.machine import catalogue
from profiles.machine.bench import copy_rate, launch_time, matmul_rate
from profiles.machine.cluster import Device, HostBridge, Link
from profiles.machine.nvml import Ancestor, NvLink, Nvml
from profiles.provenance import Quantity, Source

# One timing of a few tenths of a second on a machine that others use too.
QUICK_TIMING_ERROR = 0.3
# Links of a GPU that has them all, whose sum is the nominal rate of the catalogue's entry.
_ALL_NVLINKS = {1: 4, 2: 6, 3: 12, 4: 18, 5: 18}
_LANES = 16


@dataclass(frozen=True, slots=True)
class NodeLinks:
    """Links between the GPUs of a node; the fields of a `ClusterProfile`."""

    intra: Link
    pair: Link | None = None
    host_bridge: HostBridge | None = None
    notes: tuple[str, ...] = ()


def gpu_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpu_device(index: int) -> Device:
    """The catalogue's facts for this GPU with its true memory; timed where it is not in there.

    Launches are timed in any case: they are the host's, and no data sheet has them. Two hosts of
    an H200 took 34 and 50 us a kernel (`tests/validation/gpu.json`).
    """
    properties = torch.cuda.get_device_properties(index)
    memory = Quantity(value=properties.total_memory, source=Source.MEASURED)
    name = catalogue.accelerator_from_runtime(properties.name, properties.total_memory)
    here = torch.device("cuda", index)
    launch = _launch(here)
    if name is not None:
        own = {"memory_bytes": memory, "launch_s": launch}
        return catalogue.accelerator(name).model_copy(update=own)
    rates = {
        dtype: timed(matmul_rate(here, dtype))
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    }
    return Device(
        name=properties.name,
        kind="cuda",
        memory_bytes=memory,
        memory_bandwidth_bytes_per_s=timed(copy_rate(here)),
        flop_per_s={str(dtype).removeprefix("torch."): rate for dtype, rate in rates.items()},
        matmul_fraction=Quantity(value=1.0, source=Source.MEASURED),
        launch_s=launch,
        context_bytes=catalogue.CONTEXT,
    )


def _launch(device: torch.device) -> Quantity:
    """Assumed where the GPU has no room for a small step."""
    try:
        return timed(launch_time(device))
    except RuntimeError:
        return catalogue.LAUNCH


def gpu_links(device: Device, nvml: Nvml | str, *, count: int) -> NodeLinks:
    """Return the links between the first `count` GPUs that torch shows; `nvml` from
    `profiles.machine.nvml.opened`.

    Without the driver's answers: what such GPUs usually come with, and a note that says so.
    """
    if torch.version.hip is not None:
        return _usual(device, "the links between AMD devices are not looked at")
    if isinstance(nvml, str):
        return _usual(device, nvml)
    known = list(nvml.uuids())
    shown = [
        str(getattr(torch.cuda.get_device_properties(index), "uuid", "")) for index in range(count)
    ]
    if not set(shown) <= set(known):
        return _usual(device, "NVML does not know the devices that torch shows (MIG slices?)")
    return links_between([known.index(uuid) for uuid in shown], nvml)


def links_between(gpus: Sequence[int], nvml: Nvml) -> NodeLinks:
    """Links of these GPUs, in the order of their ranks, as the driver describes them.

    NVLink to a switch, or from each to each: that is the way. NVLink between neighbours only: a
    bridge for pairs, PCIe for the rest. No NVLink: PCIe. Where GPUs may not reach each other
    (peer-to-peer is off) all goes through the host.
    """
    links = {gpu: nvml.nvlinks(gpu) for gpu in gpus}
    if all(links.values()):
        joined = _nvlinked(gpus, links)
        if joined is not None:
            return joined
    bridged = {gpu: {link.peer for link in links[gpu]} & set(gpus) for gpu in gpus}
    pcie = _pcie(gpus, nvml)
    if len(gpus) < 3 or not all(len(peers) == 1 for peers in bridged.values()):
        return pcie
    neighbours = all(
        bridged[one] == {other} for one, other in zip(gpus[::2], gpus[1::2], strict=False)
    )
    if not neighbours:
        pairs = ", ".join(
            f"{gpus.index(gpu)} and {gpus.index(next(iter(peers)))}"
            for gpu, peers in bridged.items()
            if gpus.index(gpu) < gpus.index(next(iter(peers)))
        )
        note = (
            f"NVLink bridges join GPUs {pairs}: not neighbours, so they are not counted;"
            " CUDA_VISIBLE_DEVICES can put bridged GPUs beside each other"
        )
        return NodeLinks(pcie.intra, None, pcie.host_bridge, (*pcie.notes, note))
    pair = _bridge([link for link in links[gpus[0]] if link.peer in gpus])
    return NodeLinks(pcie.intra, pair, pcie.host_bridge, pcie.notes)


def _nvlinked(gpus: Sequence[int], links: dict[int, Sequence[NvLink]]) -> NodeLinks | None:
    """NVLink between the GPUs: through a switch, direct, or over other GPUs."""
    fewest = min(links.values(), key=len)
    generation = min(link.generation for of_gpu in links.values() for link in of_gpu)
    if any(link.peer is None for of_gpu in links.values() for link in of_gpu):
        return NodeLinks(_nvlink(generation, len(fewest)))
    to = {gpu: Counter(link.peer for link in links[gpu] if link.peer in gpus) for gpu in gpus}
    others = len(gpus) - 1
    if all(len(peers) == others for peers in to.values()):
        inside = [link for link in fewest if link.peer in gpus]
        if others == 1:
            return NodeLinks(_bridge(inside))
        least = min(min(peers.values()) for peers in to.values())
        link = _nvlink(generation, least * others)
        return NodeLinks(link.model_copy(update={"wiring": "mesh"}))
    if others > 2 and all(len(peers) > 1 for peers in to.values()):
        note = (
            "NVLink joins each GPU with some of the others, not all: planned with the published"
            " rate of whole nodes of this kind"
        )
        return NodeLinks(_nvlink(generation, len(fewest)), notes=(note,))
    return None


def _pcie(gpus: Sequence[int], nvml: Nvml) -> NodeLinks:
    slots = [nvml.pcie(gpu) for gpu in gpus]
    generation, lanes = min(g for g, _ in slots), min(w for _, w in slots)
    intra = _pcie_link(generation, lanes)
    notes = []
    if len(set(slots)) > 1:
        said = ", ".join(f"{i}: {g} x{w}" for i, (g, w) in enumerate(slots))
        notes.append(f"PCIe slots differ, the slowest counts (GPU: generation x lanes): {said}")
    pairs = list(combinations(gpus, 2))
    if any(nvml.ancestor(one, other) is Ancestor.SYSTEM for one, other in pairs):
        near = sorted({n for n in map(nvml.numa_node, gpus) if n is not None})
        where = f" (NUMA nodes {', '.join(map(str, near))})" if len(near) > 1 else ""
        notes.append(
            f"GPUs hang under different processors{where}; the link between those is in no"
            " catalogue and not counted"
        )
    open_ = all(nvml.peer_to_peer(one, other) for one, other in pairs)
    if not open_:
        notes.append("peer-to-peer is off: what GPUs exchange over PCIe goes through main memory")
    under = [
        sum(one == other or nvml.ancestor(one, other) <= Ancestor.SWITCHES for other in gpus)
        for one in gpus
    ]
    shared = max(under, default=1)
    if open_ and (shared == 1 or shared == len(gpus)):
        return NodeLinks(intra, notes=tuple(notes))
    upwards = intra.model_copy(update={"name": f"{intra.name} to the host"})
    bridge = HostBridge(link=upwards, devices=shared, peer_to_peer=open_)
    return NodeLinks(intra, host_bridge=bridge, notes=tuple(notes))


def _nvlink(generation: int, count: int) -> Link:
    """The catalogue's NVLink of this generation; in proportion where not all its links are up."""
    full = min(generation, max(_ALL_NVLINKS))
    link = catalogue.link(f"nvlink{full}")
    if full == generation and count == _ALL_NVLINKS[full]:
        return link
    known = f"{count} of {_ALL_NVLINKS[full]} links"
    if full != generation:
        known = f"NVLink {generation} as NVLink {full}, {known}"
    return _scaled(link, count / _ALL_NVLINKS[full], f"{link.name}, {count} links", known)


def _bridge(links: Sequence[NvLink]) -> Link:
    """Links from GPU to GPU: what a bridge reaches of the rate that NVML gives."""
    known = catalogue.link("nvlink-bridge")
    rates = [link.bytes_per_s for link in links if link.bytes_per_s is not None]
    if len(rates) < len(links):
        return _scaled(known, 1.0, known.name, "NVML gives no rate of the links")
    entry = catalogue.link_entry("nvlink-bridge")
    rate = sum(rates)
    name = f"NVLink{links[0].generation} bridge of {len(links)} links"
    bandwidth = known.bandwidth_bytes_per_s.model_copy(
        update={
            "value": entry.achieved * rate,
            "source": Source.DERIVED,
            "origin": f"{entry.achieved:.2f} of {rate / 1e9:.4g} GB/s (NVML): {entry.source}",
        }
    )
    return known.model_copy(update={"name": name, "bandwidth_bytes_per_s": bandwidth})


def _pcie_link(generation: int, lanes: int) -> Link:
    """The catalogue has 16 lanes of generations 3 to 6; each generation doubles the one before."""
    nearest = min(max(generation, 3), 6)
    link = catalogue.link(f"pcie{nearest}")
    if (nearest, _LANES) == (generation, lanes):
        return link
    share = 2.0 ** (generation - nearest) * lanes / _LANES
    name = f"PCIe{generation} x{lanes}"
    return _scaled(link, share, name, f"{name}, in proportion")


def _scaled(link: Link, share: float, name: str, reason: str) -> Link:
    rate = link.bandwidth_bytes_per_s
    changed = rate.model_copy(
        update={
            "value": rate.value * share,
            "source": Source.DERIVED if share != 1.0 else Source.ASSUMED,
            "origin": f"{reason}; {rate.origin}",
        }
    )
    return link.model_copy(update={"name": name, "bandwidth_bytes_per_s": changed})


def _usual(device: Device, reason: str) -> NodeLinks:
    """Links that the catalogue gives for this device, else a PCIe slot; nothing was measured."""
    entry = catalogue.accelerators().get(device.name)
    link = catalogue.link(entry.intra if entry is not None else "pcie4")
    if entry is None:
        rate = link.bandwidth_bytes_per_s.model_copy(update={"source": Source.ASSUMED})
        link = link.model_copy(update={"bandwidth_bytes_per_s": rate})
    note = f"{reason}: NVLink, PCIe and peer-to-peer are not known here, {link.name} is assumed"
    return NodeLinks(link, notes=(note,))


def timed(value: float) -> Quantity:
    """A quantity that was timed in a moment."""
    return Quantity(value=value, source=Source.MEASURED, relative_error=QUICK_TIMING_ERROR)
