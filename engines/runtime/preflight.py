"""Preflight: conditions of the machine that are known to end a training, or to hang it, later.

Lives here: one function a rule, from facts to the risks in them, and the reading of those facts.
Rules of plans and models are in `engines.legality`.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from profiles.units import format_gib

FILES_OF_A_PROCESS = 128
"""Open files of a process with torch before its first group: 20 to 40, and as many for data."""
FILES_OF_A_GROUP = 4
"""Of a gloo group besides its connections: listener, events (at most 4 were seen)."""
_P2P_OFF = ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL")


@dataclass(frozen=True, slots=True)
class Risk:
    """A condition, and the change that removes it."""

    what: str
    hint: str

    def __str__(self) -> str:
        return f"{self.what}; {self.hint}"


def open_files(*, limit: int, ranks: int, groups: int) -> Iterator[Risk]:
    """A rank has a connection to every other rank of each of its groups, and each is a file.

    Args:
        limit: open files that a process may have (`ulimit -n`).
        ranks: of the job.
        groups: process groups of a rank, taken to be of all ranks.
    """
    needed = groups * (ranks - 1 + FILES_OF_A_GROUP) + FILES_OF_A_PROCESS
    if needed > limit:
        yield Risk(
            f"a rank may have {limit} open files, {groups} groups of {ranks} ranks need up to"
            f" {needed}: connecting would fail with `Too many open files`",
            f"`ulimit -n {max(needed, 65536)}` before the start",
        )


def peer_to_peer(
    *, devices: int, over_pcie: bool, iommu_groups: int, environment: Mapping[str, str]
) -> Iterator[Risk]:
    """Direct copies between GPUs through an IOMMU or PCI access control hang or go wrong.

    NCCL takes peers at their word (its manual, "Troubleshooting: PCI Access Control Services";
    NVIDIA/nccl-tests#117, NVIDIA/nccl#631).

    Args:
        devices: GPUs of this node that the job uses.
        over_pcie: some of them reach each other over PCIe alone, and say that they can.
        iommu_groups: of the kernel; 0 where the IOMMU is off.
    """
    if devices > 1 and over_pcie and iommu_groups and not any(n in environment for n in _P2P_OFF):
        yield Risk(
            f"{devices} GPUs copy to each other over PCIe, and the IOMMU is on ({iommu_groups}"
            " groups): where it redirects them, NCCL's first collective hangs or is slow",
            "set NCCL_P2P_DISABLE=1, or switch ACS and the IOMMU off in the firmware",
        )


def shared_memory(
    *, free_bytes: int | None, workers: int, prefetch: int, batch_bytes: float, ranks: int
) -> Iterator[Risk]:
    """Loading workers hand batches over in shared memory; where it is full they die.

    Args:
        free_bytes: of /dev/shm; None: unknown.
        workers, prefetch: of one rank's loader, and the batches that each loads ahead.
        batch_bytes: of one rank's batch.
        ranks: of this node, each with such a loader.
    """
    needed = ranks * workers * prefetch * batch_bytes
    if free_bytes is not None and needed > free_bytes:
        yield Risk(
            f"{ranks} x {workers} loading workers keep {prefetch} batches of"
            f" {format_gib(batch_bytes)} each in /dev/shm, {format_gib(needed)} in all, and"
            f" {format_gib(free_bytes)} are free there: workers would end with `Bus error`",
            f"start the container with --shm-size={_mib(2 * needed)}m, or take fewer workers",
        )


def job_risks(
    *,
    ranks: int,
    groups: int,
    devices: int,
    over_pcie: bool,
    root: Path = Path("/"),
) -> list[Risk]:
    """The risks of this machine for a job; arguments are those of the rules."""
    groups_of_iommu = root / "sys/kernel/iommu_groups"
    return [
        *open_files(
            limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0], ranks=ranks, groups=groups
        ),
        *peer_to_peer(
            devices=devices,
            over_pcie=over_pcie,
            iommu_groups=len(list(groups_of_iommu.glob("*"))),
            environment=os.environ,
        ),
    ]


def shm_free_bytes(folder: str = "/dev/shm") -> int | None:
    """Free bytes of shared memory; None where there is none."""
    try:
        stat = os.statvfs(folder)
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize


def _mib(nbytes: float) -> int:
    return int(nbytes / 2**20) + 1
