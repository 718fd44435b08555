"""Detects the launcher of this process: torchrun, Slurm, MPI, a Kubernetes job, or none."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from profiles.errors import InputError
from profiles.record.bounds import MOST_DEVICES, whole_number

LOOPBACK = ("--standalone", "--local-addr", "127.0.0.1")
"""Options of torchrun for ranks of one node."""
_OWN_TORCHRUN = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True, slots=True)
class Launcher:
    """Launcher of this process and its rank in the job; without one, rank 0 of 1.

    `kind` is "plain" (nobody), "torchrun" (also anything that sets RANK and WORLD_SIZE), "slurm"
    (srun), "mpi" (Open MPI, MPICH, Intel MPI) or "kubernetes": a pod of a PyTorchJob or TrainJob in
    which torchrun has not started yet; this process then stands for the first rank of its pod.
    `notes` say what the variables leave open.
    """

    kind: Literal["plain", "torchrun", "slurm", "mpi", "kubernetes"]
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    num_nodes: int = 1
    notes: tuple[str, ...] = ()


def launcher(*, environment: Mapping[str, str] | None = None) -> Launcher:
    """Read the launcher's environment variables; torchrun's win, then a pod's, srun's, MPI's.

    Slurm counts only inside `srun`: a script under `sbatch` or a shell under `salloc` sees the
    job's variables too, but is one process.

    Raises:
        InputError: a variable is not a whole number, or rank and sizes contradict each other.
    """
    env = os.environ if environment is None else environment
    ranked = "RANK" in env and "WORLD_SIZE" in env
    if ranked and any(name in env for name in _OWN_TORCHRUN):
        detected = _torchrun(env)
    elif "PET_NNODES" in env:
        detected = _pod(env)
    elif ranked and "KUBERNETES_SERVICE_HOST" in env and "MASTER_ADDR" in env:
        # Kubeflow's PyTorchJob counts pods; without torchrun each pod is one process.
        rank, world = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
        detected = Launcher("kubernetes", rank, world, 0, 1, world)
    elif ranked:
        detected = _torchrun(env)
    elif "SLURM_STEP_NUM_TASKS" in env and "SLURM_PROCID" in env:
        detected = _slurm(env)
    elif "OMPI_COMM_WORLD_SIZE" in env:
        detected = _mpi(
            env, "OMPI_COMM_WORLD_", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
        )
    elif "PMI_SIZE" in env and "MPI_LOCALNRANKS" in env:
        detected = _mpi(env, "PMI_", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    else:
        return Launcher("plain", notes=_indexed_job(env))
    if not (
        0 <= detected.rank < detected.world_size
        and 0 <= detected.local_rank < detected.local_world_size
    ):
        raise InputError(
            f"rank {detected.rank} of {detected.world_size} (local {detected.local_rank} of"
            f" {detected.local_world_size}) cannot be",
            where=f"environment of {detected.kind}",
        )
    return detected


def _torchrun(env: Mapping[str, str]) -> Launcher:
    rank, world = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
    local_world = _integer(env, "LOCAL_WORLD_SIZE", world)
    return Launcher(
        "torchrun",
        rank,
        world,
        _integer(env, "LOCAL_RANK", rank % max(local_world, 1)),
        local_world,
        _integer(env, "GROUP_WORLD_SIZE", -(-world // max(local_world, 1))),
    )


def _pod(env: Mapping[str, str]) -> Launcher:
    """Kubeflow's variables for a torchrun to come: nodes are pods, their counts may be open."""
    open_ended = [
        f"`{name}` = {env[name]}"
        for name in ("PET_NNODES", "PET_NPROC_PER_NODE")
        if not env.get(name, "1").strip().isdecimal()
    ]
    if open_ended:  # "1:4" pods of an elastic job, "auto" processes in each
        said = " and ".join(open_ended)
        note = f"{said}: only torchrun resolves that, so only this pod is described"
        return Launcher("plain", notes=(note,))
    nodes, per_node = _integer(env, "PET_NNODES"), _integer(env, "PET_NPROC_PER_NODE", 1)
    index = env.get("PET_NODE_RANK", env.get("JOB_COMPLETION_INDEX", "0"))
    node = _integer({"PET_NODE_RANK": index}, "PET_NODE_RANK")
    return Launcher("kubernetes", node * per_node, nodes * per_node, 0, per_node, nodes)


def _indexed_job(env: Mapping[str, str]) -> tuple[str, ...]:
    if "JOB_COMPLETION_INDEX" not in env:
        return ()
    return (
        f"this is pod {env['JOB_COMPLETION_INDEX']} of an indexed Kubernetes job; how many pods it"
        " has stands in none of its variables, so only this pod is described",
    )


def _slurm(env: Mapping[str, str]) -> Launcher:
    nodes = _integer(env, "SLURM_STEP_NUM_NODES", 1)
    counts = _slurm_counts(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    world = _integer(env, "SLURM_STEP_NUM_TASKS")
    node = _integer(env, "SLURM_NODEID", 0)
    local_world = counts[node] if node < len(counts) else -(-world // max(nodes, 1))
    return Launcher(
        "slurm",
        _integer(env, "SLURM_PROCID"),
        world,
        _integer(env, "SLURM_LOCALID", 0),
        local_world,
        nodes,
    )


def _mpi(env: Mapping[str, str], prefix: str, local_rank: str, local_size: str) -> Launcher:
    world, local_world = _integer(env, prefix + "SIZE"), _integer(env, local_size)
    nodes = -(-world // max(local_world, 1))
    rank = _integer(env, prefix + "RANK")
    return Launcher("mpi", rank, world, _integer(env, local_rank), local_world, nodes)


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


def _slurm_counts(text: str) -> list[int]:
    """Tasks per node from Slurm's short form: "8(x4)" is four nodes of 8, "2,1" is 2 and 1."""
    counts: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        nodes = whole_number(repeat or "1", "tasks per node, nodes", least=0, most=MOST_DEVICES)
        counts += [whole_number(count, "tasks per node", least=0, most=MOST_DEVICES)] * nodes
    return counts


def loopback_environment() -> dict[str, str]:
    """Variables for ranks of one node that, beside `LOOPBACK`, keep them off other interfaces.

    gloo takes the address of the host's name. torchrun's store has no secret and listens on all
    interfaces: ranks meet in one of their own (see `engines.runtime.rendezvous`).
    """
    has_lo = any(name == "lo" for _, name in socket.if_nameindex())
    gloo = {"GLOO_SOCKET_IFNAME": "lo"} if has_lo else {}
    return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **gloo}
