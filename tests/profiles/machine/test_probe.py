"""This machine, or this rank's share of a job, as a profile."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from profiles.errors import InputError
from profiles.machine import catalogue, gpus
from profiles.machine.host import machine_cores, machine_memory_bytes
from profiles.machine.launcher import Launcher
from profiles.machine.probe import probe
from profiles.provenance import Source
from profiles.units import GIB

ALONE = Launcher("plain")


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


def interface(root: Path, name: str, speed: str) -> None:
    folder = root / "sys/class/net" / name
    (folder / "device").mkdir(parents=True)
    (folder / "operstate").write_text("up\n")
    (folder / "speed").write_text(f"{speed}\n")


@pytest.mark.usefixtures("no_gpu")
def test_a_slow_card_bounds_what_gloo_can_send(tmp_path: Path) -> None:
    interface(tmp_path, "eth0", "1000")
    cluster = probe(launcher=Launcher("torchrun", 0, 4, 0, 2, 2), root=tmp_path)
    assert cluster.inter is not None
    rate = cluster.inter.bandwidth_bytes_per_s
    assert rate.value == pytest.approx(0.8 * 1e9 / 8)  # sockets reach 0.8 of a line
    assert rate.source is Source.DERIVED
    assert cluster.notes == ()


@pytest.mark.usefixtures("no_gpu")
def test_a_fast_card_leaves_gloo_as_slow_as_it_is(tmp_path: Path) -> None:
    interface(tmp_path, "eth0", "100000")
    cluster = probe(launcher=Launcher("torchrun", 0, 4, 0, 2, 2), root=tmp_path)
    assert cluster.inter == catalogue.link("gloo-tcp")


@pytest.mark.usefixtures("no_gpu")
def test_unknown_facts_of_the_machine_are_reported(tmp_path: Path) -> None:
    interface(tmp_path, "eth0", "-1")
    for index in (0, 1):
        node = tmp_path / f"sys/devices/system/node/node{index}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{index}\n")
    open_ = Launcher("torchrun", 0, 2, 0, 1, 2, notes=("only this pod is described",))
    assert probe(launcher=open_, root=tmp_path).notes == (
        "only this pod is described",
        "2 NUMA nodes, 1 rank: a rank that spans several reaches a part of its memory more slowly",
        "the driver gives no rated speed of eth0",
    )


@pytest.mark.usefixtures("no_gpu")
def test_measuring_gives_rates_that_were_measured() -> None:
    device = probe(launcher=ALONE, measure=True).device
    assert device.matmul_fraction.value == 1.0
    rates = device.flop_per_s["float32"], device.memory_bandwidth_bytes_per_s, device.launch_s
    assert {rate.source for rate in rates} == {Source.MEASURED}
    assert all(rate.value > 0 for rate in rates)


@pytest.mark.timed
@pytest.mark.usefixtures("no_gpu")
def test_measured_rates_are_those_of_a_processor() -> None:
    device = probe(launcher=ALONE, measure=True).device
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
    monkeypatch.setattr(gpus, "launch_time", lambda _: 5e-5)


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
def test_launches_are_those_of_the_host_and_assumed_where_the_gpu_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch = probe(launcher=ALONE).device.launch_s
    assert (launch.value, launch.source) == (5e-5, Source.MEASURED)

    def full(_: torch.device) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpus, "launch_time", full)
    assert probe(launcher=ALONE).device.launch_s == catalogue.LAUNCH


@pytest.mark.usefixtures("two_h100")
def test_a_process_alone_has_no_buffers_of_a_group() -> None:
    alone, both = (probe(launcher=ALONE, ranks=n).device.context_bytes.value for n in (1, 2))
    assert (alone, both) == (0.8 * GIB, 2.0 * GIB)


@pytest.mark.usefixtures("two_h100")
def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(InputError, match="4 ranks on a node that shows 2 GPUs"):
        probe(launcher=Launcher("torchrun", 0, 4, 0, 4, 1))


@pytest.mark.usefixtures("two_h100")
def test_an_unknown_gpu_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = SimpleNamespace(name="NVIDIA Z999", total_memory=32 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: shown)
    monkeypatch.setattr(gpus, "matmul_rate", lambda *_: 3e14)
    monkeypatch.setattr(gpus, "copy_rate", lambda *_: 2e12)
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
