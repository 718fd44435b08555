"""Nodes of different kinds: the slowest of each quantity counts, and the profile says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from advisor.decide.choose import choose
from profiles.errors import InputError
from profiles.machine import catalogue
from profiles.machine.cluster import Collective, HostBridge, LinkFit
from profiles.machine.clusters import cluster_from_name, load_cluster, to_toml
from profiles.machine.mixed_nodes import slowest_of
from tests.factories import cpus, datasheet, facts, gpus, link

H100_A100 = "8xH100-SXM-80GB+8xA100-SXM-40GB"


def test_a_name_of_two_kinds_is_two_nodes_with_the_slower_s_numbers() -> None:
    mixed = cluster_from_name(H100_A100)
    a100 = catalogue.accelerator("A100-SXM-40GB")
    assert (mixed.num_nodes, mixed.devices_per_node, mixed.name) == (2, 8, H100_A100)
    assert mixed.device.name == "H100-SXM-80GB+A100-SXM-40GB"
    # An A100 is slower in all that both can do; fp8 it cannot do at all.
    for key in ("memory_bytes", "memory_bandwidth_bytes_per_s", "flop_per_s", "matmul_fraction"):
        assert getattr(mixed.device, key) == getattr(a100, key)
    assert mixed.intra == catalogue.link("nvlink3")
    # One card a GPU of what each comes with: 200 Gbit/s, as in a DGX A100.
    a100s = cluster_from_name("2x8xA100-SXM-40GB")
    assert mixed.inter == a100s.inter
    assert mixed.host_memory_bytes == a100s.host_memory_bytes


def test_the_note_says_which_node_decided_what() -> None:
    (note,) = cluster_from_name(H100_A100).notes
    assert note == (
        "nodes differ (1 node of H100-SXM-80GB and 1 node of A100-SXM-40GB): the slowest of each"
        " counts: of A100-SXM-40GB memory 39.4 GiB, speed 271 TFLOP/s, memory bandwidth 1400 GB/s,"
        " links in the node 234 GB/s, links between nodes 190 GB/s"
    )


def test_the_note_names_the_slowest_node_of_each_quantity() -> None:
    roomy = gpus(2, 4, memory_gib=160, intra_bytes_per_s=30e9)
    small = gpus(2, 4, memory_gib=40)
    small = small.model_copy(update={"device": small.device.model_copy(update={"name": "small"})})
    assert slowest_of([roomy, small]).notes == (
        "nodes differ (1 node of H100-like and 1 node of small): the slowest of each counts:"
        " of small memory 40.0 GiB; of H100-like links in the node 30.0 GB/s",
    )


def test_counts_systems_and_more_than_two_kinds_add_up() -> None:
    mixed = cluster_from_name("2xdgx-h100 + dgx-a100-80gb+3x8xH200-SXM")
    assert (mixed.num_nodes, mixed.devices_per_node) == (6, 8)
    assert "2 nodes of H100-SXM-80GB and 1 node of A100-SXM-80GB and 3 nodes" in mixed.notes[0]


def test_equal_nodes_are_no_mixture() -> None:
    same = cluster_from_name("8xH100-SXM-80GB+8xH100-SXM-80GB")
    plain = cluster_from_name("2x8xH100-SXM-80GB")
    assert same == plain.model_copy(update={"name": same.name})


def test_each_quantity_is_the_slowest_wherever_it_is_found() -> None:
    """A node with much memory and slow links beside one with little memory and fast links."""
    roomy = gpus(2, 4, memory_gib=160, intra_bytes_per_s=30e9, inter_bytes_per_s=100e9)
    swift = gpus(2, 4, memory_gib=40, intra_bytes_per_s=360e9, inter_bytes_per_s=10e9)
    mixed = slowest_of([roomy, swift])
    assert mixed.num_nodes == 2
    assert mixed.device.memory_bytes == swift.device.memory_bytes
    assert mixed.intra == roomy.intra
    assert mixed.inter == swift.inter
    # By hand: 4 ranks a node share 10 GB/s, a ring over all gets the whole of it.
    assert mixed.group_bandwidth(8).value == 10e9
    assert mixed.group_bandwidth(2, 4).value == 2.5e9
    assert mixed.group_bandwidth(4).value == 30e9


def test_the_slowest_product_of_peak_and_share_counts() -> None:
    base = gpus(1, 2).device
    fast = base.model_copy(
        update={
            "flop_per_s": {"bfloat16": datasheet(1000e12), "float32": datasheet(10e12)},
            "matmul_fraction": datasheet(0.5),
        }
    )
    slow = base.model_copy(
        update={
            "flop_per_s": {"bfloat16": datasheet(400e12), "float32": datasheet(40e12)},
            "matmul_fraction": datasheet(0.9),
        }
    )
    nodes = [gpus(2, 2).model_copy(update={"device": device}) for device in (fast, slow)]
    device = slowest_of(nodes).device
    reached = {d: q.value * device.matmul_fraction.value for d, q in device.flop_per_s.items()}
    assert reached == pytest.approx({"bfloat16": 360e12, "float32": 5e12})  # 0.9 x 400, 0.5 x 10


def test_measured_fits_bridges_cards_and_switches_are_merged_too() -> None:
    def fit(latency_s: float, rate: float) -> dict[Collective, LinkFit]:
        return {Collective.ALL_REDUCE: LinkFit(latency_s=latency_s, busbw_bytes_per_s=rate)}

    plain = gpus(2, 2)
    assert plain.intra is not None
    one = plain.model_copy(
        update={
            "intra": plain.intra.model_copy(update={"fits": fit(1e-5, 300e9)}),
            "pair": link("bridge", 34e9),
            "network_cards": 2,
            "cores": 64,
        }
    )
    other = plain.model_copy(
        update={
            "intra": plain.intra.model_copy(update={"fits": fit(2e-5, 350e9)}),
            "host_bridge": HostBridge(link=link("host", 20e9), devices=2, peer_to_peer=False),
            "network_cards": 1,
            "oversubscription": 2.0,
        }
    )
    mixed = slowest_of([one, other])
    assert mixed.intra is not None
    assert mixed.intra.fits == fit(2e-5, 300e9)
    assert mixed.pair is None  # one of the nodes has none
    assert mixed.host_bridge == other.host_bridge
    assert (mixed.network_cards, mixed.oversubscription, mixed.cores) == (1, 2.0, 64)


def test_no_mixture_is_faster_than_any_of_its_nodes() -> None:
    names = ["H100-SXM-80GB", "A100-PCIe-80GB", "V100-SXM2-32GB", "MI300X", "RTX-4090-24GB"]
    for name in names:
        for other in names:
            both = cluster_from_name(f"4x{name}+4x{other}")
            for part in (name, other):
                alone = cluster_from_name(f"2x4x{part}")
                for axis in ((8, 1), (4, 1), (2, 4), (2, 1)):
                    got = both.group_bandwidth(*axis).value
                    assert got <= alone.group_bandwidth(*axis).value * (1 + 1e-9), (part, other)
                assert both.device.memory_bytes.value <= alone.device.memory_bytes.value


def test_the_report_plans_for_both_and_says_so() -> None:
    decision = choose(facts(cluster=cluster_from_name(H100_A100)))
    assert decision.plan.world_size == 16
    words = " ".join(str(decision).split())
    assert "note: nodes differ (1 node of H100-SXM-80GB and 1 node of A100-SXM-40GB)" in words
    assert "of A100-SXM-40GB memory 39.4 GiB, speed 271 TFLOP/s" in words


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return path


TWO_KINDS = """\
name = "lab"
devices_per_node = 4

[inter]
link = "ethernet-100"

[[node]]
count = 2
accelerator = "H100-SXM-80GB"

[[node]]
accelerator = "A100-SXM-80GB"
host_memory = "256 GiB"

[node.intra]
link = "pcie4"
"""


def test_a_file_has_a_table_for_each_kind_and_shares_the_rest(tmp_path: Path) -> None:
    mixed = load_cluster(written(tmp_path, TWO_KINDS))
    assert (mixed.name, mixed.num_nodes, mixed.devices_per_node) == ("lab", 3, 4)
    assert mixed.inter == catalogue.link("ethernet-100")
    assert mixed.intra is not None
    assert mixed.intra.name == "PCIe4 x16"
    assert mixed.host_memory_bytes is not None
    assert mixed.host_memory_bytes.value == 256 * 2**30
    assert "2 nodes of H100-SXM-80GB and 1 node of A100-SXM-80GB" in mixed.notes[0]
    assert load_cluster(written(tmp_path, to_toml(mixed))) == mixed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "8xH100-SXM-80GB+4xA100-SXM-80GB",
            "all nodes need the same number of devices, for all ranks get equal work:"
            " 8 (1x8xH100-SXM-80GB), 4 (1x4xA100-SXM-80GB)\n"
            "  nodes of different kinds\n\n"
            "hint: take 4 on every node, and leave the others out of the job",
        ),
        (
            "2xH100-SXM-80GB+2xXeon-8488C-CPU",
            "all nodes need the same kind of device, for all ranks get equal work:"
            " cuda (1x2xH100-SXM-80GB), cpu (1x2xXeon-8488C-CPU)\n"
            "  nodes of different kinds",
        ),
    ],
)
def test_nodes_that_cannot_share_a_job_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        cluster_from_name(text)
    assert str(caught.value) == message


def test_profiles_of_different_jobs_are_refused() -> None:
    with pytest.raises(InputError, match=r"same size of the job in nodes.*: 2 .*, 3 "):
        slowest_of([gpus(2, 8), gpus(3, 8)])
    with pytest.raises(InputError, match="no node was looked at"):
        slowest_of([])
    with pytest.raises(InputError, match="same kind of device"):
        slowest_of([gpus(1, 2), cpus(2)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("devices_per_node = 4", "nodes = 3"), "counted by `count` in each table"),
        (("count = 2", "nodes = 2"), "counted by `count` in each table"),
        (("count = 2", "counts = 2"), "unknown key `counts`"),
    ],
)
def test_a_mistake_in_a_node_table_is_named(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        load_cluster(written(tmp_path, TWO_KINDS.replace(*change)))


def test_count_outside_of_a_node_table_names_the_right_key(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown key `count`"):
        load_cluster(written(tmp_path, 'accelerator = "h200"\ncount = 2\n'))


def test_a_wrong_link_in_a_node_table_is_named_with_its_place(tmp_path: Path) -> None:
    path = written(tmp_path, TWO_KINDS.replace('link = "pcie4"', 'link = "pcie9"'))
    with pytest.raises(InputError, match="unknown link `pcie9`") as caught:
        load_cluster(path)
    assert caught.value.where == f"{path}: node.1: intra.link"
