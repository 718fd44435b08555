"""Nodes that are joined by the links inside of them: NVL72 racks of 18 nodes with four devices.

The counts are those of NVIDIA's data sheet of the GB200 NVL72: 72 devices and 36 processors of 72
cores in 18 trays, 130 TB/s in all on one NVLink switch (1.8 TB/s a device, both ways together).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from profiles.errors import InputError
from profiles.machine.cluster import Collective
from profiles.machine.clusters import cluster_from_name, load_cluster, resolve_cluster, to_toml
from tests.advisor.cost.collectives import collective_s


def test_a_rack_is_18_nodes_of_four_on_one_switch() -> None:
    rack = cluster_from_name("72xGB200")
    assert (rack.num_nodes, rack.devices_per_node, rack.world_size) == (18, 4, 72)
    assert (rack.domain_devices, rack.num_domains) == (72, 1)
    assert rack.cores == 2 * 72
    assert rack.host_memory_bytes is not None
    assert rack.host_memory_bytes.value == 2 * 480e9
    assert rack == cluster_from_name("18x4xGB200").model_copy(update={"name": rack.name})


@pytest.mark.parametrize(("group", "stride"), [(4, 1), (8, 1), (72, 1), (18, 4), (9, 8), (2, 36)])
def test_every_group_in_a_rack_talks_over_nvlink_at_its_full_rate(group: int, stride: int) -> None:
    rack, node = cluster_from_name("72xGB200"), cluster_from_name("4xGB200")
    assert not rack.crosses_nodes(group, stride)
    assert rack.link(group, stride) == node.intra
    assert node.intra is not None
    assert rack.group_bandwidth(group, stride) == node.intra.bandwidth_bytes_per_s


def test_two_racks_are_joined_by_the_cards_of_all_their_nodes() -> None:
    racks = cluster_from_name("2x72xGB200")
    assert (racks.num_nodes, racks.num_domains, racks.domain_devices) == (36, 2, 72)
    assert racks.link(72) == racks.intra
    assert racks.link(2, 72) == racks.inter
    # One ConnectX-7 of 400 Gbit/s a device.
    card = racks.group_bandwidth(2, 72).value
    assert 0.8 * 50e9 < card < 50e9
    inside = collective_s(racks, Collective.ALL_REDUCE, 1e11, group_size=72)
    across = collective_s(racks, Collective.ALL_REDUCE, 1e11, group_size=144)
    assert inside == pytest.approx(2 * 71 / 72 * 1e11 / (0.77 * 900e9), rel=0.01)
    assert across > inside


def test_a_rack_by_its_own_name_and_part_of_one() -> None:
    rack = cluster_from_name("gb200-nvl72")
    assert (rack.num_nodes, rack.devices_per_node, rack.num_domains) == (18, 4, 1)
    part = cluster_from_name("8xGB300")
    assert (part.num_nodes, part.devices_per_node, part.num_domains) == (2, 4, 1)
    three = cluster_from_name("3xGB200")
    assert (three.num_nodes, three.devices_per_node) == (1, 3)


def test_devices_that_fill_no_nodes_are_refused_with_those_that_do() -> None:
    with pytest.raises(InputError, match="70 is not a multiple of 4 devices per node") as caught:
        cluster_from_name("70xGB200")
    assert "write `68xGB200`" in str(caught.value)


def test_nodes_that_make_no_whole_racks_are_in_equal_parts_of_them() -> None:
    racks = cluster_from_name("20x4xGB200")
    assert (racks.domain_nodes, racks.num_domains) == (10, 2)


def test_a_file_says_how_many_nodes_are_joined(tmp_path: Path) -> None:
    rack = cluster_from_name("72xGB200")
    path = tmp_path / "rack.toml"
    path.write_text(to_toml(rack))
    assert "nodes_per_domain = 18" in path.read_text()
    assert load_cluster(path) == rack
    pairs = resolve_cluster(str(path)).model_copy(update={"nodes_per_domain": 2})
    assert (pairs.domain_devices, pairs.link(16).name) == (8, getattr(rack.inter, "name", None))
