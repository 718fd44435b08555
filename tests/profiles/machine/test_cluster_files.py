"""Cluster files: what is completed, what is replaced, and how they read."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiles.errors import UnknownNameError
from profiles.machine import catalogue
from profiles.machine.cluster import (
    Collective,
    HostBridge,
    LinkFit,
)
from profiles.machine.clusters import cluster_from_name, load_cluster, resolve_cluster, to_toml
from profiles.provenance import Quantity, Source
from profiles.units import GIB


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_short_file_is_completed_from_the_catalogue(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """\
nodes = 4
devices_per_node = 8
accelerator = "H100-SXM-80GB"

[inter]
bandwidth = "400 Gbit/s"
""",
    )
    cluster = load_cluster(path)
    assert cluster.world_size == 32
    assert cluster.device == catalogue.accelerator("H100-SXM-80GB")
    assert cluster.intra == catalogue.link("nvlink4")
    assert cluster.inter is not None
    bandwidth = Quantity(value=50e9, source=Source.USER)
    assert cluster.inter.bandwidth_bytes_per_s == bandwidth
    assert cluster.inter.latency_s == catalogue.link("ib-ndr-8x400").latency_s


def test_a_file_replaces_numbers_of_an_accelerator_and_says_where_they_are_from(
    tmp_path: Path,
) -> None:
    path = written(
        tmp_path,
        """\
system = "dgx-h100"
cores = 96

[device]
memory = "70 GiB"
matmul_fraction = { value = 0.7, source = "measured", relative_error = 0.05, origin = "mamf" }
flop_rate = { bfloat16 = "800 TFLOP/s" }

[intra]
link = "pcie5"
""",
    )
    cluster = load_cluster(path)
    assert cluster.device.memory_bytes == Quantity(value=70 * GIB, source=Source.USER)
    assert cluster.device.matmul_fraction == Quantity(
        value=0.7, source=Source.MEASURED, relative_error=0.05, origin="mamf"
    )
    assert cluster.device.flop_per_s["bfloat16"].value == 800e12
    assert cluster.device.flop_per_s["float32"].value == 67e12
    assert cluster.intra == catalogue.link("pcie5")
    assert (cluster.devices_per_node, cluster.cores) == (8, 96)


def test_a_device_of_no_catalogue_needs_only_memory_and_rates(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """\
devices_per_node = 2

[device]
name = "own chip"
memory = "64 GiB"
memory_bandwidth = "1 TB/s"
flop_rate = { float32 = "30 TFLOP/s" }

[intra]
bandwidth = "25 GB/s"
latency = "9 us"
""",
    )
    cluster = load_cluster(path)
    assert (cluster.device.name, cluster.device.kind) == ("own chip", "cuda")
    assert cluster.device.matmul_fraction.source is Source.ASSUMED
    assert cluster.intra is not None
    assert cluster.intra.latency_s.value == pytest.approx(9e-6)


def test_a_file_describes_how_a_node_is_wired(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """\
nodes = 4
devices_per_node = 4
accelerator = "RTX-3090-24GB"
network_cards = 1
oversubscription = 2.0
nodes_per_switch = 2
notes = ["borrowed until May"]

[pair]
link = "nvlink-bridge"

[host_bridge]
peer_to_peer = false
""",
    )
    cluster = load_cluster(path)
    assert cluster.pair == catalogue.link("nvlink-bridge")
    # What is not said: all devices under one bridge, as fast upwards as a device's own slot.
    assert cluster.host_bridge == HostBridge(
        link=catalogue.link("pcie4"), devices=4, peer_to_peer=False
    )
    assert cluster.bottleneck(2).name == "NVLink bridge (RTX 3090/A6000)"
    assert (
        cluster.group_bandwidth(4).value == catalogue.link("pcie4").bandwidth_bytes_per_s.value / 2
    )
    assert cluster.notes == ("borrowed until May",)
    # Rings 0 2 and 1 3 leave their switch with every hop: 10 GB/s down, 2 x 10 / 2 up for 8 rings.
    assert cluster.group_bandwidth(2, 8).value == 1.25e9
    assert load_cluster(written(tmp_path, to_toml(cluster))) == cluster


def test_the_cards_of_a_named_network_are_counted(tmp_path: Path) -> None:
    assert cluster_from_name("2xp5-48xlarge").network_cards == 32
    assert cluster_from_name("2x8xH100-SXM-80GB").network_cards is None
    text = 'nodes = 2\ndevices_per_node = 8\naccelerator = "h200"\n[inter]\nlink = "ib-ndr-1x400"'
    assert load_cluster(written(tmp_path, text)).network_cards == 1


def test_names_toml_and_json_files_all_resolve(tmp_path: Path) -> None:
    cluster = cluster_from_name("2x8xh200")
    cluster.save(tmp_path / "cluster.json")
    (tmp_path / "cluster.toml").write_text(to_toml(cluster), encoding="utf-8")
    assert resolve_cluster("2x8xh200") == cluster
    assert resolve_cluster(str(tmp_path / "cluster.json")) == cluster
    assert resolve_cluster(str(tmp_path / "cluster.toml")) == cluster


@pytest.mark.parametrize(
    "text", [*catalogue.systems(), *(f"2x4x{name}" for name in catalogue.accelerators())]
)
def test_every_named_cluster_survives_its_file(text: str, tmp_path: Path) -> None:
    cluster = cluster_from_name(text)
    assert load_cluster(written(tmp_path, to_toml(cluster))) == cluster


def test_a_file_of_one_device_shows_what_more_devices_need(tmp_path: Path) -> None:
    text = to_toml(cluster_from_name("h200"))
    for count, link in (("devices_per_node = 1", "nvlink4"), ("nodes = 1", "ethernet-100")):
        assert f'# link = "{link}"' in text
        text = text.replace(count, count.replace("1", "2"))
    for commented in ("[intra]", "[inter]", 'link = "nvlink4"', 'link = "ethernet-100"'):
        text = text.replace(f"# {commented}", commented)
    cluster = load_cluster(written(tmp_path, text))
    assert cluster.intra == catalogue.link("nvlink4")
    assert cluster.inter == catalogue.link("ethernet-100")


def test_a_bench_reads_as_people_write_it(tmp_path: Path) -> None:
    text = """
accelerator = "h200"
devices_per_node = 4
overlap = { computing = 1.1, communication = { value = 1.3, source = "measured" } }

[device.matmul_efficiency]
512 = 0.2

[[axes]]
group_size = 2
stride = 2
fits.all_gather = { latency = "1 ms", bandwidth = "250 GB/s" }
"""
    cluster = load_cluster(written(tmp_path, text))
    assert cluster.measured(Collective.ALL_GATHER, 2, 2) == LinkFit(
        latency_s=1e-3, busbw_bytes_per_s=250e9
    )
    assert cluster.measured(Collective.ALL_GATHER, 2) is None
    assert cluster.measured(Collective.ALL_REDUCE, 2, 2) is None
    assert cluster.device.matmul_efficiency[512] == Quantity(value=0.2, source=Source.USER)
    assert cluster.overlap is not None
    assert cluster.overlap.computing.source is Source.USER
    assert cluster.overlap.communication.source is Source.MEASURED
    with pytest.raises(UnknownNameError, match="unknown collective `all_gathr`") as caught:
        load_cluster(written(tmp_path, text.replace("all_gather", "all_gathr")))
    assert caught.value.where is not None
    assert caught.value.where.endswith("cluster.toml: axes.0.fits")


def test_the_file_reads_as_people_write_it() -> None:
    text = to_toml(cluster_from_name("2xdgx-h100"))
    assert 'name = "2xdgx-h100"\nnodes = 2\ndevices_per_node = 8\n' in text
    assert 'host_memory = { value = "2048 GiB", source = "datasheet"' in text
    assert 'memory = { value = "79.1 GiB", source = "datasheet", relative_error = 0.02' in text
    assert '\nbfloat16 = { value = "989 TFLOP/s", source = "datasheet"' in text
    assert 'launch = { value = "33 us"' in text
    assert '[inter]\nname = "IB NDR 8x400Gb (DGX H100)"\nbandwidth = { value = "372 GB/s"' in text
