"""The machine around the devices, from trees of /proc and /sys as Linux writes them."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

from profiles.machine.host import (
    NetworkCard,
    machine_cores,
    machine_memory_bytes,
    network_cards,
    numa_nodes,
    resident_bytes,
    scheduled_s,
)
from profiles.units import GIB


def fake_root(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_a_version_2_limit_above_the_group_counts(tmp_path: Path) -> None:
    root = fake_root(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/container\n",
            "sys/fs/cgroup/pod/memory.max": "1073741824\n",
            "sys/fs/cgroup/pod/container/memory.max": "max\n",
            "sys/fs/cgroup/pod/container/cpu.max": "100000 100000\n",
        },
    )
    assert machine_memory_bytes(root=root) == GIB
    assert machine_cores(root=root) == 1


def test_a_version_1_limit_seen_from_inside_the_container_counts(tmp_path: Path) -> None:
    root = fake_root(
        tmp_path,
        {
            # The host's path, which does not exist inside; the mount is the container's own group.
            "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "2147483648\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert machine_memory_bytes(root=root) == 2 * GIB
    assert machine_cores(root=root) == 1


def test_no_limit_leaves_the_whole_machine(tmp_path: Path) -> None:
    root = fake_root(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/\n4:cpu,cpuacct:/\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory.max": "max\n",
            "sys/fs/cgroup/cpu.max": "max 100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    everything = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine_memory_bytes(root=root) == everything
    assert machine_memory_bytes(root=tmp_path / "nothing") == everything
    assert machine_cores(root=root) == len(os.sched_getaffinity(0))


def test_resident_memory_grows_with_what_is_touched() -> None:
    with mmap.mmap(-1, 64 * 2**20) as memory:  # not torch's: freed pages would be taken again
        before = resident_bytes()
        for place in range(0, len(memory), mmap.PAGESIZE):
            memory[place] = 1
        assert 60 * 2**20 < resident_bytes() - before < 100 * 2**20


def test_a_set_of_cores_counts_in_both_versions(tmp_path: Path) -> None:
    two = fake_root(
        tmp_path / "v2",
        {
            "proc/self/cgroup": "0::/pod\n",
            "sys/fs/cgroup/cpuset.cpus.effective": "0-63\n",
            "sys/fs/cgroup/pod/cpuset.cpus.effective": "5\n",
        },
    )
    assert machine_cores(root=two) == 1
    one = fake_root(
        tmp_path / "v1",
        {
            "proc/self/cgroup": "3:cpuset:/docker/abc\n",
            "sys/fs/cgroup/cpuset/cpuset.cpus": "7\n",
        },
    )
    assert machine_cores(root=one) == 1
    empty = fake_root(
        tmp_path / "empty",
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpuset.cpus.effective": "\n"},
    )
    assert machine_cores(root=empty) == len(os.sched_getaffinity(0))


def test_numa_nodes_without_cores_do_not_count(tmp_path: Path) -> None:
    # A dual-socket server with hyper-threads: 2 x 2 cores, 4 threads each.
    root = fake_root(
        tmp_path,
        {
            "sys/devices/system/node/node0/cpulist": "0-1,4-5\n",
            "sys/devices/system/node/node1/cpulist": "2-3,6-7\n",
            # Memory without cores (CXL, or a Grace-Hopper's device memory) is no place for a rank.
            "sys/devices/system/node/node2/cpulist": "\n",
        },
    )
    assert numa_nodes(root=root) == 2
    assert numa_nodes(root=tmp_path / "nothing") == 0


def test_cards_are_counted_once_with_their_rated_speed(tmp_path: Path) -> None:
    """As on a DGX H100, cut short: InfiniBand, one such port down, and Ethernet to log in."""
    root = fake_root(
        tmp_path,
        {
            "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
            "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
            "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
            "sys/class/infiniband/mlx5_0/device/numa_node": "1\n",
            "sys/class/infiniband/mlx5_0/device/net/ib0/mtu": "2044\n",
            "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
            "sys/class/infiniband/mlx5_1/ports/1/rate": "10 Gb/sec (4X SDR)\n",
            "sys/class/infiniband/mlx5_2/ports/1/state": "4: ACTIVE\n",
            "sys/class/infiniband/mlx5_2/ports/1/link_layer": "Ethernet\n",
            "sys/class/infiniband/mlx5_2/ports/1/rate": "100 Gb/sec (4X EDR)\n",
            "sys/class/infiniband/mlx5_2/device/net/ens6/mtu": "1500\n",
            "sys/class/net/ib0/operstate": "up\n",
            "sys/class/net/ib0/device/numa_node": "1\n",
            "sys/class/net/ens6/operstate": "up\n",
            "sys/class/net/ens6/speed": "100000\n",
            "sys/class/net/ens6/device/numa_node": "0\n",
            "sys/class/net/eno3/operstate": "up\n",
            "sys/class/net/eno3/speed": "10000\n",
            "sys/class/net/eno3/device/numa_node": "-1\n",
            "sys/class/net/eno4/operstate": "down\n",
            "sys/class/net/eno4/speed": "-1\n",
            "sys/class/net/eno4/device/numa_node": "0\n",
            "sys/class/net/docker0/operstate": "up\n",
            "sys/class/net/docker0/speed": "10000\n",
            "sys/class/net/lo/operstate": "unknown\n",
        },
    )
    assert network_cards(root=root) == (
        NetworkCard("mlx5_0", "infiniband", 50e9),
        NetworkCard("mlx5_2", "roce", 12.5e9),
        NetworkCard("eno3", "ethernet", 1.25e9),
    )


def test_a_virtual_machine_s_card_has_no_rated_speed(tmp_path: Path) -> None:
    # virtio: a device, up, and -1 for the speed.
    root = fake_root(
        tmp_path,
        {
            "sys/class/net/eth0/operstate": "up\n",
            "sys/class/net/eth0/speed": "-1\n",
            "sys/class/net/eth0/device/vendor": "0x1af4\n",
        },
    )
    assert network_cards(root=root) == (NetworkCard("eth0", "ethernet", None),)


def test_a_container_s_veth_is_no_card(tmp_path: Path) -> None:
    # A veth says 10 Gbit/s whatever is behind it.
    root = fake_root(
        tmp_path,
        {"sys/class/net/eth0/operstate": "up\n", "sys/class/net/eth0/speed": "10000\n"},
    )
    assert network_cards(root=root) == ()
    assert network_cards(root=tmp_path / "nothing") == ()


def test_the_time_on_the_cores_is_that_of_all_threads(tmp_path: Path) -> None:
    root = fake_root(
        tmp_path,
        {
            "proc/self/task/7/schedstat": "1500000000 250000000 12\n",
            "proc/self/task/8/schedstat": "500000000 250000000 3\n",
        },
    )
    assert scheduled_s(root=root) == (2.0, 0.5)
    assert scheduled_s(root=tmp_path / "elsewhere") == (0.0, 0.0)


def test_a_thread_that_shares_its_core_waits_for_half_of_the_time() -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # on the same core
    try:
        time.sleep(0.3)
        running, waiting = scheduled_s()
        end = time.perf_counter() + 0.5
        while time.perf_counter() < end:
            pass
        ran, waited = scheduled_s()
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, cores)
    assert waited - waiting > 0.3 * (ran - running)
