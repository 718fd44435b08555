"""Benches that were run before, kept in the user's cache folder."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist

from profiles import cache
from profiles.machine.bench.disturbed import BEGINNING
from profiles.machine.bench.job import Job, joined
from profiles.machine.bench.measure import BUDGET_S, bench
from profiles.machine.bench.nodes import of_all_nodes
from profiles.machine.bench.progress import progress
from profiles.machine.cluster import ClusterProfile
from profiles.record import Document, Record

log = logging.getLogger(__name__)

# Which card the ranks talk over; another one is another bench.
CHOOSES_CARD = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")
PATIENCE_S = 60.0


class BenchKey(Record):
    """Conditions of a bench; its figures are used only where all of them are equal.

    Attributes:
        hosts: of every rank, in rank order.
        threads: that one rank computes with.
        cards: the variables that choose the network card.
    """

    hosts: tuple[str, ...]
    num_nodes: int
    devices_per_node: int
    device: str
    timed: str
    threads: int
    cards: dict[str, str]
    torch: str
    ours: str


class CachedBench(Document):
    """A bench with what it depends on and when it was run."""

    key: BenchKey
    measured_at: str
    cluster: ClusterProfile


def recall_or_bench(
    cluster: ClusterProfile, *, folder: Path | None = None, note: Callable[[str], None] = log.info
) -> ClusterProfile:
    """This job's machines as an equal job timed them before, else timed now and kept for the next.

    Rank 0 decides for all which of both it is; its terminal shows a bar.

    Args:
        cluster: of this job, from `probe`.
        folder: where benches are kept; None is the user's cache folder.
        note: told when figures of before are used.

    Raises:
        RankError: a rank did not answer in time, or broke off; it is named.
    """
    known = recall(cluster, folder=folder)
    if known is not None:
        note(f"speeds as timed on {known.measured_at}")
        return known.cluster
    rank = dist.get_rank() if dist.is_initialized() else 0
    with progress(rank=rank, budget_s=BUDGET_S) as tell:
        timed = bench(cluster, tell=tell)
    keep(timed, folder=folder)
    return timed


def recall(cluster: ClusterProfile, *, folder: Path | None = None) -> CachedBench | None:
    """The bench that an equal job kept, with the rest of `cluster` as it is now; None without one.

    Rank 0 reads and decides for all ranks. A file that cannot be used is noted in the log.

    Raises:
        RankError: a rank did not answer in time, or broke off; it is named.
    """
    with joined(patience_s=PATIENCE_S) as job:
        cluster = of_all_nodes(job, cluster)
        key = _key(job, cluster)
        cached = _read(_path(key, folder), key) if job.rank == 0 else None
        if cached:
            today = _with_speeds(cluster, cached.cluster)
            cached = cached.model_copy(update={"cluster": today})
        text = job.of_rank(0, cached.to_json() if cached else "")
    return CachedBench.from_json(text, where="rank 0") if text else None


def keep(cluster: ClusterProfile, *, folder: Path | None = None) -> None:
    """Keep this job's bench for `recall`; a folder that cannot be written is noted in the log."""
    with joined(patience_s=PATIENCE_S) as job:
        key = _key(job, cluster)
    if job.rank != 0:
        return
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    cache.keep(_path(key, folder), CachedBench(key=key, measured_at=now, cluster=cluster))


def _key(job: Job, cluster: ClusterProfile) -> BenchKey:
    return BenchKey(
        hosts=tuple(job.of_all(socket.gethostname())),
        num_nodes=cluster.num_nodes,
        devices_per_node=cluster.devices_per_node,
        device=cluster.device.name,
        timed=job.device.type,
        threads=torch.get_num_threads(),
        cards={name: os.environ[name] for name in CHOOSES_CARD if name in os.environ},
        torch=torch.__version__,
        ours=cache.our_version(),
    )


def _path(key: BenchKey, folder: Path | None) -> Path | None:
    return cache.cache_path("bench", key.model_dump(mode="json"), folder=folder)


def _read(path: Path | None, key: BenchKey) -> CachedBench | None:
    cached = cache.recall(path, CachedBench)
    return cached if cached is not None and cached.key == key else None


def _with_speeds(cluster: ClusterProfile, timed: ClusterProfile) -> ClusterProfile:
    """`cluster` with all that `bench` times as it was in `timed`; memory and names are today's."""
    known = timed.device
    device = cluster.device.model_copy(
        update={
            "memory_bandwidth_bytes_per_s": known.memory_bandwidth_bytes_per_s,
            "flop_per_s": known.flop_per_s,
            "matmul_fraction": known.matmul_fraction,
            "matmul_efficiency": known.matmul_efficiency,
            "launch_s": known.launch_s,
            "host_link_bytes_per_s": known.host_link_bytes_per_s,
            "new_memory_bytes_per_s": known.new_memory_bytes_per_s,
        }
    )
    return cluster.model_copy(
        update={
            "device": device,
            "intra": timed.intra,
            "inter": timed.inter,
            "axes": timed.axes,
            "overlap": timed.overlap,
            "shared_cores": timed.shared_cores,
            "notes": (*cluster.notes, *(n for n in timed.notes if n.startswith(BEGINNING))),
        }
    )
