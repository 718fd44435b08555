"""What launchers say, what containers allow, and this machine as a profile."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from profiles import catalogue
from profiles import probe as probe_module
from profiles.errors import InputError
from profiles.probe import (
    Launcher,
    launcher,
    machine_cores,
    machine_memory_bytes,
    probe,
    resident_bytes,
)
from profiles.provenance import Source
from profiles.units import GIB

ALONE = Launcher("plain")
TORCHRUN = {
    "RANK": "11",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_WORLD_SIZE": "2",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "4(x4)",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Launcher("plain", 0, 1, 0, 1, 1)),
        (TORCHRUN, Launcher("torchrun", 11, 16, 3, 8, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Launcher("torchrun", 1, 2, 1, 2, 1)),
        (SRUN, Launcher("slurm", 5, 16, 1, 4, 4)),
        (TORCHRUN | SRUN, Launcher("torchrun", 11, 16, 3, 8, 2)),
        # A batch script outside srun: the job has 16 tasks, this process is none of them.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}, Launcher("plain")),
        (
            {
                "OMPI_COMM_WORLD_RANK": "2",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            Launcher("mpi", 2, 4, 0, 2, 2),
        ),
        (
            {
                "PMI_RANK": "3",
                "PMI_SIZE": "4",
                "MPI_LOCALRANKID": "3",
                "MPI_LOCALNRANKS": "4",
            },
            Launcher("mpi", 3, 4, 3, 4, 1),
        ),
    ],
)
def test_the_launcher_is_read_from_its_variables(
    environment: dict[str, str], expected: Launcher
) -> None:
    assert launcher(environment=environment) == expected


def test_slurm_s_short_form_gives_each_node_its_own_count() -> None:
    uneven = SRUN | {"SLURM_STEP_TASKS_PER_NODE": "8,3(x2),2", "SLURM_NODEID": "2"}
    assert launcher(environment=uneven).local_world_size == 3


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"RANK": "0", "WORLD_SIZE": "two"}, "`WORLD_SIZE` = 'two' is not a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of 2"),
        (TORCHRUN | {"LOCAL_RANK": "8"}, r"local 8 of\s+8"),
    ],
)
def test_contradictory_variables_are_refused(environment: dict[str, str], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        launcher(environment=environment)


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
    before = resident_bytes()
    held = torch.ones(64 * 2**20, dtype=torch.uint8)
    assert 60 * 2**20 < resident_bytes() - before < 100 * 2**20
    del held


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_one_cpu_rank_gets_the_machine_and_has_no_link() -> None:
    cluster = probe(launcher=ALONE)
    assert cluster.world_size == 1
    assert cluster.intra is None
    assert cluster.inter is None
    assert cluster.device.kind == "cpu"
    assert cluster.device.memory_bytes.value == machine_memory_bytes()
    assert cluster.cores == machine_cores()
    assert cluster.device.context_bytes.source is Source.MEASURED
    assert 50e6 < cluster.device.context_bytes.value < 4e9  # a process with torch imported


@pytest.mark.usefixtures("no_gpu")
def test_several_cpu_ranks_share_memory_and_speed_over_an_assumed_link() -> None:
    one, four = probe(launcher=ALONE), probe(launcher=ALONE, ranks=4)
    assert four.devices_per_node == 4
    assert four.device.memory_bytes.value == machine_memory_bytes() // 4
    assert four.device.flop_per_s["float32"].value == pytest.approx(
        one.device.flop_per_s["float32"].value / 4
    )
    assert four.device.flop_per_s["float32"].source is Source.ASSUMED
    assert four.intra is not None
    link = four.intra.bandwidth_bytes_per_s
    assert link.source is Source.ASSUMED
    assert link.low < 0.9e9 < link.high
    assert four.sources == {
        "device speed": Source.ASSUMED,
        "links in the node": Source.ASSUMED,
    }


@pytest.mark.usefixtures("no_gpu")
def test_a_job_s_ranks_share_their_node() -> None:
    cluster = probe(launcher=Launcher("torchrun", 5, 8, 1, 4, 2))
    assert (cluster.num_nodes, cluster.devices_per_node) == (2, 4)
    assert cluster.intra is not None
    assert cluster.inter is not None
    assert cluster.device.memory_bytes.value == machine_memory_bytes() // 4


@pytest.mark.usefixtures("no_gpu")
def test_measuring_gives_rates_that_two_ways_of_counting_agree_on() -> None:
    cluster = probe(launcher=ALONE, measure=True)
    device = cluster.device
    assert device.matmul_fraction.value == 1.0
    assert device.flop_per_s["float32"].source is Source.MEASURED
    # Any CPU in use: above a scalar core's 1 GFLOP/s, below 500 GFLOP/s a core.
    assert 1e9 < device.flop_per_s["float32"].value < 500e9 * machine_cores()
    assert 0.2e9 < device.memory_bandwidth_bytes_per_s.value < 2e12
    assert 1e-7 < device.launch_s.value < 1e-3


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("place", "ranks", "complaint"),
    [
        (Launcher("torchrun", 0, 4, 0, 4, 1), 2, "2 ranks were asked for, this job runs 4"),
        (Launcher("slurm", 0, 11, 0, 8, 2), None, "11 ranks on 2 nodes, 8 of them here"),
        (ALONE, 0, "`ranks` = 0"),
    ],
)
def test_a_job_that_cannot_be_described_is_refused(
    place: Launcher, ranks: int | None, complaint: str
) -> None:
    with pytest.raises(InputError, match=complaint):
        probe(launcher=place, ranks=ranks)


@pytest.fixture
def two_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=84_929_347_584)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: shown)


@pytest.mark.usefixtures("two_h100")
def test_a_known_gpu_brings_the_catalogue_s_facts_and_its_own_memory() -> None:
    cluster = probe(launcher=ALONE)
    known = catalogue.accelerator("H100-SXM-80GB")
    assert cluster.devices_per_node == 2
    assert cluster.device.flop_per_s == known.flop_per_s
    assert cluster.device.memory_bytes.value == 84_929_347_584
    assert cluster.device.memory_bytes.source is Source.MEASURED
    assert cluster.intra == catalogue.link("nvlink4")


@pytest.mark.usefixtures("two_h100")
def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(InputError, match="4 ranks on a node that shows 2 GPUs"):
        probe(launcher=Launcher("torchrun", 0, 4, 0, 4, 1))


@pytest.mark.usefixtures("two_h100")
def test_an_unknown_gpu_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = SimpleNamespace(name="NVIDIA Z999", total_memory=32 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: shown)
    monkeypatch.setattr(probe_module, "matmul_rate", lambda *_: 3e14)
    monkeypatch.setattr(probe_module, "copy_rate", lambda *_: 2e12)
    device = probe(launcher=ALONE).device
    assert device.name == "NVIDIA Z999"
    assert device.flop_per_s["bfloat16"].value == 3e14
    assert device.flop_per_s["bfloat16"].source is Source.MEASURED


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_real_gpu_is_described() -> None:
    cluster = probe(launcher=ALONE)
    assert cluster.device.kind == "cuda"
    total = torch.cuda.get_device_properties(0).total_memory
    assert cluster.device.memory_bytes.value == total
