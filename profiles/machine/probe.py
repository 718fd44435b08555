"""This machine, or this job, as a ClusterProfile: devices, memory, cores and the launcher's ranks.

Little is timed unless asked; what is not looked up or timed is assumed, with a wide range, and what
could not be found is said in the profile's notes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from profiles.errors import InputError
from profiles.machine import catalogue
from profiles.machine.bench import copy_rate, launch_time, matmul_rate
from profiles.machine.cluster import ClusterProfile, Device, Link
from profiles.machine.gpus import NodeLinks, gpu_count, gpu_device, gpu_links, timed
from profiles.machine.host import (
    NetworkCard,
    machine_cores,
    machine_memory_bytes,
    network_cards,
    numa_nodes,
    resident_bytes,
)
from profiles.machine.launcher import Launcher
from profiles.machine.launcher import launcher as from_environment
from profiles.machine.nvml import Nvml, opened
from profiles.provenance import Quantity, Source

# A core does 32 (AVX2) to 64 (AVX-512, two units) fp32 operations in a cycle at 2 to 4 GHz: 64 to
# 256 GFLOP/s; where a "core" is one of two hardware threads, half of it.
ASSUMED_FLOP_PER_S_PER_CORE, ASSUMED_FLOP_ERROR = 100e9, 0.75
# bfloat16: half the float32 rate where it is emulated, nine times on AMX units.
ASSUMED_BFLOAT16_ERROR = 0.9
ASSUMED_MATMUL_FRACTION = Quantity(value=0.8, source=Source.ASSUMED, relative_error=0.25)
# DDR4 and DDR5 give 20 to 40 GB/s a channel, shared by 2 to 16 cores.
ASSUMED_MEMORY_RATE_PER_CORE, ASSUMED_MEMORY_ERROR = 8e9, 0.75
# The catalogue's entry whose share of the rated speed a card reaches, by its kind, and from which
# rate on, in Gbit/s.
_LIKE = {
    "infiniband": ((400, "ib-ndr-1x400"), (200, "ib-hdr-1x200"), (0, "ib-edr-1x100")),
    "roce": ((0, "roce-8x400"),),
    "ethernet": ((0, "ethernet-100"),),
}


def probe(
    *,
    launcher: Launcher | None = None,
    ranks: int | None = None,
    measure: bool = False,
    nvml: Nvml | None = None,
    root: Path = Path("/"),
) -> ClusterProfile:
    """Look at this machine, or at this rank's share of the running job.

    Under a launcher: its nodes and its ranks per node, as this rank sees its own node. Alone: every
    visible GPU, or `ranks` CPU ranks (1 by default) that share memory and cores equally. Looking
    is local; ranks of a job should use one rank's profile (`profiles.machine.bench` returns a
    common one).

    Args:
        launcher: from `launcher()`; None reads the environment.
        ranks: plan for this many ranks on this machine; only without a launcher.
        measure: time a matrix product and a memory copy (under a second) instead of assuming a
            CPU's speed. A GPU that the catalogue does not have is always timed, and so are the
            launches of any: they are the host's.
        nvml: answers in place of NVIDIA's driver.
        root: where /proc and /sys are.

    Raises:
        InputError: nodes of unequal size, `ranks` under a launcher, or more ranks than GPUs.
    """
    job = launcher if launcher is not None else from_environment()
    if job.kind != "plain" and ranks is not None and ranks != job.local_world_size:
        raise InputError(
            f"{ranks} ranks were asked for, this job runs {job.local_world_size} on a node",
            where=f"environment of {job.kind}",
        )
    if job.world_size != job.num_nodes * job.local_world_size:
        raise InputError(
            f"{job.world_size} ranks on {job.num_nodes} nodes, {job.local_world_size} of them"
            " here: nodes of unequal size cannot be planned for",
            where=f"environment of {job.kind}",
        )
    if ranks is not None and ranks < 1:
        raise InputError(f"`ranks` = {ranks}: at least one rank is needed")
    gpus = gpu_count()
    alone = job.kind == "plain"
    per_node = (ranks or max(gpus, 1)) if alone else job.local_world_size
    if gpus and per_node > gpus:
        raise InputError(
            f"{per_node} ranks on a node that shows {gpus} GPUs",
            hints=["start one rank per GPU, or hide the GPUs: `CUDA_VISIBLE_DEVICES=`"],
        )
    memory, cores = machine_memory_bytes(root=root), machine_cores(root=root)
    cards = network_cards(root=root) if job.num_nodes > 1 else ()
    if gpus:
        device = gpu_device(job.local_rank if per_node > 1 else 0)
        links = _gpu_links(device, nvml, per_node)
        device = catalogue.in_cluster(device, links.intra, world=job.num_nodes * per_node)
        inter, used, notes = _gpu_network(device, cards, per_node)
    else:
        device = _cpu(memory // per_node, cores / per_node, measure=measure)
        links = NodeLinks(catalogue.link("gloo-local"))
        inter, used, notes = _cpu_network(cards)
        near = numa_nodes(root=root)
        if near > per_node:
            said = f"{near} NUMA nodes, {per_node} rank{'s' if per_node > 1 else ''}"
            local = f"{said}: a rank that spans several reaches a part of its memory more slowly"
            links = NodeLinks(links.intra, notes=(local,))
    nodes = f"{job.num_nodes}x" if job.num_nodes > 1 else ""
    return ClusterProfile(
        name=f"{nodes}{per_node}x{device.name} (this machine)",
        notes=(
            *job.notes,
            *links.notes,
            *(notes if job.num_nodes > 1 else ()),
        ),
        num_nodes=job.num_nodes,
        devices_per_node=per_node,
        network_cards=used if job.num_nodes > 1 else None,
        pair=links.pair if per_node > 1 else None,
        host_bridge=links.host_bridge if per_node > 1 else None,
        device=device,
        intra=links.intra if per_node > 1 else None,
        inter=inter if job.num_nodes > 1 else None,
        host_memory_bytes=Quantity(value=memory, source=Source.MEASURED),
        cores=cores,
    )


def _gpu_links(device: Device, nvml: Nvml | None, count: int) -> NodeLinks:
    if count == 1:  # nothing to join
        return NodeLinks(catalogue.link("pcie4"))
    if nvml is not None:
        return gpu_links(device, nvml, count=count)
    with opened() as driver:
        return gpu_links(device, driver, count=count)


def _gpu_network(
    device: Device, cards: Sequence[NetworkCard], per_node: int
) -> tuple[Link, int | None, tuple[str, ...]]:
    """The network that a node's cards give together, how many count, and what is left open.

    NCCL takes InfiniBand and RoCE cards where there are any, and all of the fastest rate; slower
    ones are for storage or management.
    """
    verbs = [card for card in cards if card.kind != "ethernet"]
    rated = [card for card in verbs or cards if card.bytes_per_s is not None]
    if not rated:
        link = catalogue.assumed_network(device.name, per_node)
        return link, None, (f"{_unrated(cards)}; {link.name} is assumed",)
    (kind, rate), count = max(
        Counter((card.kind, card.bytes_per_s or 0.0) for card in rated).items(),
        key=lambda item: (item[0][1], item[1]),
    )
    idle = [card.name for card in cards if (card.kind, card.bytes_per_s) != (kind, rate)]
    notes = [f"network cards that are not counted: {', '.join(idle)}"] if idle else []
    return _rated(kind, rate, count), count, tuple(notes)


def _cpu_network(cards: Sequence[NetworkCard]) -> tuple[Link, int | None, tuple[str, ...]]:
    """Gloo's own speed, or the fastest card's where that is slower: gloo uses one."""
    link = catalogue.link("gloo-tcp")
    rates = [card.bytes_per_s for card in cards if card.bytes_per_s is not None]
    if not rates:
        return link, 1, (_unrated(cards),)
    card = _rated("ethernet", max(rates), 1)
    if card.bandwidth_bytes_per_s.value >= link.bandwidth_bytes_per_s.value:
        return link, 1, ()
    return card.model_copy(update={"latency_s": link.latency_s}), 1, ()


def _rated(kind: str, rate: float, count: int) -> Link:
    """Cards of one rate: the share of it that the catalogue's nearest relative reaches."""
    gbit = rate * 8 / 1e9
    like = next(name for least, name in _LIKE[kind] if gbit >= least)
    entry, link = catalogue.link_entry(like), catalogue.link(like)
    name = {"infiniband": "InfiniBand", "roce": "RoCE", "ethernet": "Ethernet"}[kind]
    return Link(
        name=f"{name} {count}x{gbit:g}Gb",
        bandwidth_bytes_per_s=Quantity(
            value=entry.achieved * rate * count,
            source=Source.DERIVED,
            relative_error=entry.achieved_error,
            origin=f"rated {count} x {gbit:g} Gbit/s; {entry.achieved:.2f} of it: {entry.source}",
        ),
        latency_s=link.latency_s,
    )


def _unrated(cards: Sequence[NetworkCard]) -> str:
    if not cards:
        return "no network card is visible here, only virtual interfaces or none"
    names = ", ".join(card.name for card in cards)
    return f"the driver gives no rated speed of {names}"


def _cpu(memory_bytes: int, cores: float, *, measure: bool) -> Device:
    """One CPU rank: its share of memory and cores."""
    if measure:
        cpu, threads = torch.device("cpu"), torch.get_num_threads()
        torch.set_num_threads(max(1, int(cores)))
        try:
            speed = {
                "float32": timed(matmul_rate(cpu, torch.float32)),
                "bfloat16": timed(matmul_rate(cpu, torch.bfloat16)),
            }
            memory_rate = timed(copy_rate(cpu))
            launch = timed(launch_time(cpu))
        finally:
            torch.set_num_threads(threads)
        fraction = Quantity(value=1.0, source=Source.MEASURED)
    else:
        origin = f"{cores:g} cores that nobody timed"
        peak = Quantity(
            value=ASSUMED_FLOP_PER_S_PER_CORE * cores,
            source=Source.ASSUMED,
            relative_error=ASSUMED_FLOP_ERROR,
            origin=origin,
        )
        half = peak.model_copy(update={"relative_error": ASSUMED_BFLOAT16_ERROR})
        speed = {"float32": peak, "bfloat16": half}
        memory_rate = Quantity(
            value=ASSUMED_MEMORY_RATE_PER_CORE * cores,
            source=Source.ASSUMED,
            relative_error=ASSUMED_MEMORY_ERROR,
            origin=origin,
        )
        launch, fraction = catalogue.CPU_LAUNCH, ASSUMED_MATMUL_FRACTION
    return Device(
        name="cpu",
        kind="cpu",
        memory_bytes=Quantity(value=memory_bytes, source=Source.MEASURED),
        memory_bandwidth_bytes_per_s=memory_rate,
        flop_per_s=speed,
        matmul_fraction=fraction,
        launch_s=launch,
        context_bytes=Quantity(
            value=resident_bytes(), source=Source.MEASURED, origin="resident memory of the process"
        ),
    )
