"""Cluster names: what they mean, what they assume, and what their mistakes say."""

from __future__ import annotations

import pytest

from profiles.errors import FileError, InputError
from profiles.machine import catalogue
from profiles.machine.clusters import cluster_from_name, resolve_cluster
from profiles.provenance import Source
from profiles.units import GIB


@pytest.mark.parametrize(
    ("text", "nodes", "devices", "name"),
    [
        ("4x8xH100-SXM-80GB", 4, 8, "H100-SXM-80GB"),
        ("8xH100-SXM-80GB", 1, 8, "H100-SXM-80GB"),
        ("H100-SXM-80GB", 1, 1, "H100-SXM-80GB"),
        ("16X4Xh200", 16, 4, "H200-SXM"),
        ("8xmi300x", 1, 8, "MI300X"),
        ("2xdgx-h100", 2, 8, "H100-SXM-80GB"),
        ("dgx-a100-40gb", 1, 8, "A100-SXM-40GB"),
        ("3xmi300x-8", 3, 8, "MI300X"),
        ("2xp5.48xlarge", 2, 8, "H100-SXM-80GB"),
        ("2 x 8 x H100-SXM-80GB", 2, 8, "H100-SXM-80GB"),
    ],
)
def test_a_name_counts_nodes_and_devices(text: str, nodes: int, devices: int, name: str) -> None:
    cluster = cluster_from_name(text)
    assert (cluster.num_nodes, cluster.devices_per_node) == (nodes, devices)
    device = catalogue.accelerator(name)
    assert cluster.device == catalogue.in_cluster(device, cluster.intra, world=nodes * devices)


def test_links_exist_only_where_there_is_something_to_join() -> None:
    assert cluster_from_name("h200").intra is None
    assert cluster_from_name("8xh200").inter is None
    assert cluster_from_name("2x1xh200").intra is None
    assert cluster_from_name("2x1xh200").inter is not None


def test_the_assumed_network_is_one_400_gbit_card_per_h100() -> None:
    for devices in (1, 4, 8):
        inter = cluster_from_name(f"4x{devices}xH100-SXM-80GB").inter
        assert inter is not None
        # 50 GB/s a card, of which 370 to 380 of 400 GB/s are published for eight.
        assert 0.925 <= inter.bandwidth_bytes_per_s.value / (devices * 50e9) <= 0.95
        assert inter.bandwidth_bytes_per_s.source is Source.ASSUMED
        assert "DGX H100" in inter.bandwidth_bytes_per_s.origin


def test_a_card_of_no_usual_node_gets_one_ethernet_card_a_node() -> None:
    inter = cluster_from_name("2x8xL4").inter
    assert inter is not None
    assert inter.name == "Ethernet 100Gb"
    assert inter.bandwidth_bytes_per_s.source is Source.ASSUMED


def test_a_named_system_s_network_is_published_not_assumed() -> None:
    cluster = cluster_from_name("2xp4d-24xlarge")
    assert cluster.inter == catalogue.link("efa-v1")
    assert cluster.host_memory_bytes is not None
    assert cluster.host_memory_bytes.value == 1152 * GIB  # AWS instance types


def test_short_nodes_get_their_share_of_memory_and_cores() -> None:
    cluster = cluster_from_name("4xH100-SXM-80GB")
    assert cluster.host_memory_bytes is not None
    assert cluster.host_memory_bytes.value == 1024 * GIB  # half a DGX H100's 2 TiB
    assert cluster.cores == 56


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "4x8xH100-SMX-80GB",
            """\
unknown accelerator `H100-SMX-80GB`
  cluster `4x8xH100-SMX-80GB`

hint: did you mean `H100-SXM-80GB` or `H800-SXM-80GB`?
hint: write "4x8xH100-SXM-80GB" (nodes x devices x accelerator), "2xdgx-h100" or a file""",
        ),
        (
            "8xH1000",
            """\
unknown accelerator `H1000`
  cluster `8xH1000`

hint: did you mean `H100` or `V100`?
hint: write "4x8xH100-SXM-80GB" (nodes x devices x accelerator), "2xdgx-h100" or a file""",
        ),
        (
            "DGXH100",
            """\
unknown accelerator `DGXH100`

hint: did you mean `dgx-h100` or `dgx-h200`?
hint: write "4x8xH100-SXM-80GB" (nodes x devices x accelerator), "2xdgx-h100" or a file""",
        ),
        (
            "0x8xh200",
            """\
cluster `0x8xh200` has no devices

hint: write "4x8xH100-SXM-80GB" (nodes x devices x accelerator), "2xdgx-h100" or a file""",
        ),
        (
            "2x4xdgx-h100",
            """\
cluster `2x4xdgx-h100` counts devices, but `dgx-h100` already has 8

hint: write `2xdgx-h100` for 2 nodes""",
        ),
        (
            "",
            """\
the cluster has no name

hint: write "4x8xH100-SXM-80GB" (nodes x devices x accelerator), "2xdgx-h100" or a file""",
        ),
    ],
)
def test_a_wrong_name_says_what_to_write(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        cluster_from_name(text)
    assert str(caught.value) == message


def test_a_missing_file_is_named() -> None:
    with pytest.raises(FileError, match=r"cannot read `no/such\.toml`: No such file"):
        resolve_cluster("no/such.toml")


def test_a_process_by_itself_has_no_process_group() -> None:
    alone, over_pcie, over_nvlink = (
        cluster_from_name(name).device.context_bytes.value
        for name in ("1x1xL4-24GB", "1x8xL4-24GB", "1x8xH100-SXM-80GB")
    )
    assert alone < over_pcie < over_nvlink
