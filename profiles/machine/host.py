"""The machine around the devices: cores and memory under container limits, NUMA, network cards.

All of it is read from /proc and /sys; `root` stands for "/", so that tests bring their own trees.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# cgroup v1 writes "no limit" as the largest multiple of a page in 63 bits.
_V1_NO_LIMIT = 2**62
_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class NetworkCard:
    """A port that is up. `bytes_per_s` is its rated speed; None: the driver does not say."""

    name: str
    kind: Literal["infiniband", "roce", "ethernet"]
    bytes_per_s: float | None


def machine_memory_bytes(*, root: Path = _ROOT) -> int:
    """Main memory this process may use: the machine's, or a container's limit where lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [
        *_cgroup_values(root, "", "memory.max"),
        *_cgroup_values(root, "memory", "memory.limit_in_bytes"),
    ]
    known = [int(text) for text in limits if text.isdecimal() and int(text) < _V1_NO_LIMIT]
    return min([total, *known])


def machine_cores(*, root: Path = _ROOT) -> int:
    """Processor cores this process may use: affinity, or a container's set or quota where lower."""
    affinity = getattr(os, "sched_getaffinity", None)  # absent on macOS
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    sets = [
        *_cgroup_values(root, "", "cpuset.cpus.effective"),
        *_cgroup_values(root, "cpuset", "cpuset.effective_cpus"),
        *_cgroup_values(root, "cpuset", "cpuset.cpus"),
    ]
    allowed = [len(_listed(text)) for text in sets if text]
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
    return max(1, int(min([cores, *allowed, *quotas])))


def resident_bytes() -> int:
    """Memory this process holds right now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")


def scheduled_s(*, root: Path = _ROOT) -> tuple[float, float]:
    """Seconds that this process's threads had a core, and that they waited for one: those that
    live, since each began. Zero where the kernel does not count (`/proc/PID/schedstat`)."""
    counts = [(_read(file) or "").split() for file in (root / "proc/self/task").glob("*/schedstat")]
    known = [each for each in counts if len(each) > 1]
    return sum(int(each[0]) for each in known) / 1e9, sum(int(each[1]) for each in known) / 1e9


def numa_nodes(*, root: Path = _ROOT) -> int:
    """Number of NUMA nodes that have cores; 0 where the kernel shows none."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    return sum(bool(_listed(_read(folder / "cpulist") or "")) for folder in folders)


def network_cards(*, root: Path = _ROOT) -> tuple[NetworkCard, ...]:
    """Ports of network cards that are up, with their rated speed.

    What has no hardware behind it (loopback, bridges, the veth of a container) is no card. A RoCE
    card shows twice, as a verbs device and as an Ethernet interface; it is counted once.
    """
    cards: list[NetworkCard] = []
    with_verbs: set[str] = set()
    for device in sorted((root / "sys/class/infiniband").glob("*")):
        with_verbs |= {interface.name for interface in (device / "device/net").glob("*")}
        for port in sorted((device / "ports").glob("[0-9]*")):
            if "ACTIVE" not in (_read(port / "state") or ""):
                continue
            on_ethernet = (_read(port / "link_layer") or "") == "Ethernet"
            match = re.match(r"([\d.]+) Gb/sec", _read(port / "rate") or "")
            cards.append(
                NetworkCard(
                    name=device.name,
                    kind="roce" if on_ethernet else "infiniband",
                    bytes_per_s=float(match[1]) * 1e9 / 8 if match else None,
                )
            )
    for interface in sorted((root / "sys/class/net").glob("*")):
        is_hardware = (interface / "device").exists()
        if not is_hardware or interface.name in with_verbs:
            continue
        if _read(interface / "operstate") != "up":
            continue
        speed = _read(interface / "speed") or ""  # in Mbit/s; -1 where the driver does not know
        rate = int(speed) * 1e6 / 8 if speed.isdecimal() and int(speed) > 0 else None
        cards.append(NetworkCard(interface.name, "ethernet", rate))
    return tuple(cards)


def _listed(text: str) -> list[int]:
    """Numbers from the kernel's short form: "0-3,8" is 0, 1, 2, 3 and 8."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def _read(path: Path) -> str | None:
    """The file's text without its line end; None where it is missing or will not be read.

    Interfaces that are down answer `speed` with an error.
    """
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _cgroup_values(root: Path, controller: str, file: str) -> list[str]:
    """The file's text in this process's control group and all above it; "" is version 2.

    Inside a container the group's path may be that of the host; then the mount itself is the
    container's group.
    """
    values = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, names, path = line.split(":", 2)
        if controller not in names.split(","):
            continue
        mount = root / "sys/fs/cgroup" / controller
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(mount):
                break
            text = _read(folder / file)
            if text is not None:
                values.append(text)
    return values
