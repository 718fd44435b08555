"""This machine, or this job, as a ClusterProfile: devices, memory, cores and the launcher's ranks.

Nothing is timed unless asked; what is not looked up or timed is assumed, with a wide range.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from profiles import catalogue
from profiles.bench import copy_rate, launch_time, matmul_rate
from profiles.cluster import ClusterProfile, Device, Link
from profiles.clusters import assumed_network
from profiles.errors import InputError
from profiles.provenance import Quantity, Source

# A core does 32 (AVX2) to 64 (AVX-512, two units) fp32 operations in a cycle at 2 to 4 GHz: 64 to
# 256 GFLOP/s; where a "core" is one of two hardware threads, half of it.
ASSUMED_FLOP_PER_S_PER_CORE, ASSUMED_FLOP_ERROR = 100e9, 0.75
# bfloat16: half the float32 rate where it is emulated, nine times on AMX units.
ASSUMED_BFLOAT16_ERROR = 0.9
ASSUMED_MATMUL_FRACTION = Quantity(value=0.8, source=Source.ASSUMED, relative_error=0.25)
# DDR4 and DDR5 give 20 to 40 GB/s a channel, shared by 2 to 16 cores.
ASSUMED_MEMORY_RATE_PER_CORE, ASSUMED_MEMORY_ERROR = 8e9, 0.75
# A small eager operation on CPU: dispatch and allocation, a few microseconds.
ASSUMED_LAUNCH = Quantity(value=5e-6, source=Source.ASSUMED, relative_error=0.8)
# Gloo ranks on one machine, 2 to 4 ranks on 2 cores: all-reduce bus bandwidth 0.6 to 1.1 GB/s, two
# ranks alone send 1.7 to 2.5 GB/s; a 4 KB all-reduce takes 0.15 to 8 ms. Between network
# namespaces, 4 ranks: 0.36 to 0.55 GB/s however fast the link. (Measured with torch 2.13.)
GLOO_INTRA_BYTES_PER_S, GLOO_INTRA_ERROR = 0.9e9, 0.6
GLOO_INTER_BYTES_PER_S, GLOO_INTER_ERROR = 0.5e9, 0.6
GLOO_LATENCY_S, GLOO_LATENCY_ERROR = 0.5e-3, 0.8
# One timing of a few tenths of a second on a machine that others use too.
QUICK_TIMING_ERROR = 0.3

# cgroup v1 writes "no limit" as the largest multiple of a page in 63 bits.
_V1_NO_LIMIT = 2**62


@dataclass(frozen=True, slots=True)
class Launcher:
    """Who started this process and its place in the job; alone, rank 0 of 1.

    `kind` is "plain" (nobody), "torchrun" (also anything that sets RANK and WORLD_SIZE), "slurm"
    (srun) or "mpi" (Open MPI, MPICH, Intel MPI).
    """

    kind: Literal["plain", "torchrun", "slurm", "mpi"]
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    num_nodes: int = 1


def launcher(*, environment: Mapping[str, str] | None = None) -> Launcher:
    """Read the launcher's environment variables; torchrun's win, then srun's, then MPI's.

    Slurm counts only inside `srun`: a script under `sbatch` or a shell under `salloc` sees the
    job's variables too, but is one process.

    Raises:
        InputError: a variable is not a whole number, or rank and sizes contradict each other.
    """
    env = os.environ if environment is None else environment
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, world = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
        local_world = _integer(env, "LOCAL_WORLD_SIZE", world)
        found = Launcher(
            "torchrun",
            rank,
            world,
            _integer(env, "LOCAL_RANK", rank % max(local_world, 1)),
            local_world,
            _integer(env, "GROUP_WORLD_SIZE", -(-world // max(local_world, 1))),
        )
    elif "SLURM_STEP_NUM_TASKS" in env and "SLURM_PROCID" in env:
        nodes = _integer(env, "SLURM_STEP_NUM_NODES", 1)
        counts = _slurm_counts(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
        world = _integer(env, "SLURM_STEP_NUM_TASKS")
        node = _integer(env, "SLURM_NODEID", 0)
        local_world = counts[node] if node < len(counts) else -(-world // max(nodes, 1))
        found = Launcher(
            "slurm",
            _integer(env, "SLURM_PROCID"),
            world,
            _integer(env, "SLURM_LOCALID", 0),
            local_world,
            nodes,
        )
    elif "OMPI_COMM_WORLD_SIZE" in env:
        found = _mpi(env, "OMPI_COMM_WORLD_", "LOCAL_RANK", "LOCAL_SIZE")
    elif "PMI_SIZE" in env and "MPI_LOCALNRANKS" in env:
        found = _mpi(env, "PMI_", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    else:
        return Launcher("plain")
    if not (0 <= found.rank < found.world_size and 0 <= found.local_rank < found.local_world_size):
        raise InputError(
            f"rank {found.rank} of {found.world_size} (local {found.local_rank} of"
            f" {found.local_world_size}) cannot be",
            where=f"environment of {found.kind}",
        )
    return found


_from_environment = launcher


def probe(
    *, launcher: Launcher | None = None, ranks: int | None = None, measure: bool = False
) -> ClusterProfile:
    """Look at this machine, or at this rank's share of the running job.

    Under a launcher: its nodes and its ranks per node, as this rank sees its own node. Alone: every
    visible GPU, or `ranks` CPU ranks (1 by default) that share memory and cores equally. Looking
    is local; ranks of a job should use one rank's profile (`profiles.bench` returns a common one).

    Args:
        launcher: from `launcher()`; None reads the environment.
        ranks: plan for this many ranks on this machine; only without a launcher.
        measure: time a matrix product and a memory copy (under a second) instead of assuming a
            CPU's speed. A GPU that the catalogue does not have is always timed.

    Raises:
        InputError: nodes of unequal size, `ranks` under a launcher, or more ranks than GPUs.
    """
    found = launcher if launcher is not None else _from_environment()
    if found.kind != "plain" and ranks is not None and ranks != found.local_world_size:
        raise InputError(
            f"{ranks} ranks were asked for, this job runs {found.local_world_size} on a node",
            where=f"environment of {found.kind}",
        )
    if found.world_size != found.num_nodes * found.local_world_size:
        raise InputError(
            f"{found.world_size} ranks on {found.num_nodes} nodes, {found.local_world_size} of them"
            " here: nodes of unequal size cannot be planned for",
            where=f"environment of {found.kind}",
        )
    if ranks is not None and ranks < 1:
        raise InputError(f"`ranks` = {ranks}: at least one rank is needed")
    gpus = _gpu_count()
    alone = found.kind == "plain"
    per_node = (ranks or max(gpus, 1)) if alone else found.local_world_size
    if gpus and per_node > gpus:
        raise InputError(
            f"{per_node} ranks on a node that shows {gpus} GPUs",
            hints=["start one rank per GPU, or hide the GPUs: `CUDA_VISIBLE_DEVICES=`"],
        )
    memory, cores = machine_memory_bytes(), machine_cores()
    if gpus:
        device, default_link = _gpu(found.local_rank if per_node > 1 else 0)
        intra, inter = default_link, assumed_network(device.name, per_node)
    else:
        device = _cpu(memory // per_node, cores / per_node, measure=measure)
        intra = _gloo("gloo on one machine", GLOO_INTRA_BYTES_PER_S, GLOO_INTRA_ERROR)
        inter = _gloo("gloo between machines", GLOO_INTER_BYTES_PER_S, GLOO_INTER_ERROR)
    nodes = f"{found.num_nodes}x" if found.num_nodes > 1 else ""
    return ClusterProfile(
        name=f"{nodes}{per_node}x{device.name} (this machine)",
        num_nodes=found.num_nodes,
        devices_per_node=per_node,
        device=device,
        intra=intra if per_node > 1 else None,
        inter=inter if found.num_nodes > 1 else None,
        host_memory_bytes=Quantity(value=memory, source=Source.MEASURED),
        cores=cores,
    )


def machine_memory_bytes(*, root: Path = Path("/")) -> int:
    """Main memory this process may use: the machine's, or a container's limit where lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [
        *_cgroup_values(root, "", "memory.max"),
        *_cgroup_values(root, "memory", "memory.limit_in_bytes"),
    ]
    known = [int(text) for text in limits if text.isdecimal() and int(text) < _V1_NO_LIMIT]
    return min([total, *known])


def machine_cores(*, root: Path = Path("/")) -> int:
    """Processor cores this process may use: its affinity, or a container's quota where lower."""
    affinity = getattr(os, "sched_getaffinity", None)  # absent on macOS
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quotas = []
    for text in _cgroup_values(root, "", "cpu.max"):
        quota, _, period = text.partition(" ")
        if quota.isdecimal() and period.isdecimal():
            quotas.append(int(quota) / int(period))
    periods = _cgroup_values(root, "cpu", "cpu.cfs_period_us")
    for quota, period in zip(
        _cgroup_values(root, "cpu", "cpu.cfs_quota_us"), periods, strict=False
    ):
        if quota.isdecimal() and period.isdecimal():
            quotas.append(int(quota) / int(period))
    return max(1, int(min([cores, *quotas])))


def resident_bytes() -> int:
    """Memory this process holds right now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise InputError(
            f"`{name}` = {text!r} is not a whole number", where="environment variables"
        ) from None


def _mpi(env: Mapping[str, str], prefix: str, local_rank: str, local_size: str) -> Launcher:
    if prefix.startswith("OMPI"):
        local_rank, local_size = prefix + local_rank, prefix + local_size
    world, local_world = _integer(env, prefix + "SIZE"), _integer(env, local_size)
    nodes = -(-world // max(local_world, 1))
    rank = _integer(env, prefix + "RANK")
    return Launcher("mpi", rank, world, _integer(env, local_rank), local_world, nodes)


def _slurm_counts(text: str) -> list[int]:
    """Tasks per node from Slurm's short form: "8(x4)" is four nodes of 8, "2,1" is 2 and 1."""
    counts: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(repeat or 1)
    return counts


def _cgroup_values(root: Path, controller: str, file: str) -> list[str]:
    """The file's text in this process's control group and all above it; "" is version 2.

    Inside a container the group's path may be that of the host; then the mount itself is the
    container's group.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    values = []
    for line in lines:
        _, names, path = line.split(":", 2)
        if controller not in names.split(","):
            continue
        mount = root / "sys/fs/cgroup" / controller
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(mount):
                break
            try:
                values.append((folder / file).read_text().strip())
            except OSError:
                continue
    return values


def _gpu_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _gpu(index: int) -> tuple[Device, Link]:
    """The catalogue's facts for this GPU with its true memory; timed where it is not in there."""
    properties = torch.cuda.get_device_properties(index)
    memory = Quantity(value=properties.total_memory, source=Source.MEASURED)
    name = catalogue.accelerator_from_runtime(properties.name, properties.total_memory)
    if name is not None:
        known = catalogue.accelerator(name)
        link = catalogue.link(catalogue.accelerators()[name].intra)
        return known.model_copy(update={"memory_bytes": memory}), link
    rates = {
        dtype: _timed(matmul_rate(torch.device("cuda", index), dtype))
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    }
    device = Device(
        name=properties.name,
        kind="cuda",
        memory_bytes=memory,
        memory_bandwidth_bytes_per_s=_timed(copy_rate(torch.device("cuda", index))),
        flop_per_s={str(dtype).removeprefix("torch."): rate for dtype, rate in rates.items()},
        matmul_fraction=Quantity(value=1.0, source=Source.MEASURED),
        launch_s=catalogue.LAUNCH,
        context_bytes=catalogue.CONTEXT,
    )
    link = catalogue.link("pcie4")
    bandwidth = link.bandwidth_bytes_per_s.model_copy(update={"source": Source.ASSUMED})
    return device, link.model_copy(update={"bandwidth_bytes_per_s": bandwidth})


def _cpu(memory_bytes: int, cores: float, *, measure: bool) -> Device:
    """One CPU rank: its share of memory and cores."""
    if measure:
        cpu, threads = torch.device("cpu"), torch.get_num_threads()
        torch.set_num_threads(max(1, int(cores)))
        try:
            speed = {
                "float32": _timed(matmul_rate(cpu, torch.float32)),
                "bfloat16": _timed(matmul_rate(cpu, torch.bfloat16)),
            }
            memory_rate = _timed(copy_rate(cpu))
            launch = _timed(launch_time(cpu))
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
        launch, fraction = ASSUMED_LAUNCH, ASSUMED_MATMUL_FRACTION
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


def _gloo(name: str, bytes_per_s: float, relative_error: float) -> Link:
    origin = "gloo on 2 shared cores; `bench` measures it"
    return Link(
        name=name,
        bandwidth_bytes_per_s=Quantity(
            value=bytes_per_s, source=Source.ASSUMED, relative_error=relative_error, origin=origin
        ),
        latency_s=Quantity(
            value=GLOO_LATENCY_S,
            source=Source.ASSUMED,
            relative_error=GLOO_LATENCY_ERROR,
            origin=origin,
        ),
    )


def _timed(value: float) -> Quantity:
    return Quantity(value=value, source=Source.MEASURED, relative_error=QUICK_TIMING_ERROR)
