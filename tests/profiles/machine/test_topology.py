"""Bandwidth of groups: by hand, and against routing every ring through the graph."""

from __future__ import annotations

import itertools
from collections import Counter
from math import lcm

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiles.machine.cluster import Collective, HostBridge, LinkFit
from profiles.machine.topology import Share, Tier, Topology
from tests.counting import count_calls
from tests.factories import gpus, link

GB = 1e9


def rate(topology: Topology, group_size: int, stride: int = 1) -> tuple[float, Tier]:
    share = topology.share(group_size, stride)
    return round(share.bytes_per_s / GB, 9), share.tier


class TestCards:
    """Two nodes of eight devices at 360 GB/s; cards of 50 GB/s."""

    eight = Topology(2, 8, device_bytes_per_s=360 * GB, node_bytes_per_s=400 * GB, cards=8)
    one = Topology(2, 8, device_bytes_per_s=360 * GB, node_bytes_per_s=50 * GB, cards=1)

    def test_a_group_inside_a_node_uses_no_card(self) -> None:
        for axis in ((8, 1), (2, 4), (2, 1), (4, 2)):
            assert rate(self.one, *axis) == (360, Tier.INTRA)

    def test_eight_cards_outrun_the_links_inside(self) -> None:
        assert rate(self.eight, 16) == (360, Tier.INTRA)

    def test_one_card_is_what_a_ring_over_both_nodes_gets(self) -> None:
        assert rate(self.one, 16) == (50, Tier.INTER)

    def test_eight_groups_have_a_card_each_or_share_one(self) -> None:
        assert rate(self.eight, 2, 8) == (50, Tier.INTER)
        assert rate(self.one, 2, 8) == (6.25, Tier.INTER)

    def test_a_group_with_two_of_eight_ranks_gets_a_quarter_of_the_cards(self) -> None:
        assert rate(self.eight, 4, 4) == (100, Tier.INTER)
        assert rate(self.one, 4, 4) == (12.5, Tier.INTER)

    def test_the_card_with_most_devices_decides(self) -> None:
        # Three cards of 50 GB/s: devices 0-2, 3-5 and 6-7.
        three = Topology(2, 8, device_bytes_per_s=360 * GB, node_bytes_per_s=150 * GB, cards=3)
        share = three.share(2, 8)
        assert share.bytes_per_s == pytest.approx(50 * GB / 3)

    def test_more_cards_than_devices_are_shared_out(self) -> None:
        # A p5.48xlarge: 32 cards of 12.5 GB/s for 8 devices.
        p5 = Topology(2, 8, device_bytes_per_s=360 * GB, node_bytes_per_s=400 * GB, cards=32)
        assert rate(p5, 2, 8) == (50, Tier.INTER)


def test_groups_that_do_not_divide_a_node_share_the_cards_of_the_node_between_them() -> None:
    # Groups of 12 on nodes of 8: the middle node has 4 ranks of each, and half its cards for each.
    three = Topology(3, 8, device_bytes_per_s=360 * GB, node_bytes_per_s=400 * GB, cards=8)
    assert rate(three, 12) == (200, Tier.INTER)


def test_a_pair_across_a_node_border_goes_through_the_cards() -> None:
    # Pairs on nodes of 3: ranks 2 and 3 are on different nodes, and each has a card of 50 GB/s.
    cluster = gpus(2, 3, intra_bytes_per_s=360 * GB, inter_bytes_per_s=150 * GB)
    assert cluster.crosses_nodes(2)
    assert cluster.group_bandwidth(2).value == 50 * GB
    assert not gpus(1, 3).crosses_nodes(2)


class TestOversubscription:
    """400 GB/s a node, twice as much down as up."""

    @staticmethod
    def two_to_one(nodes: int, per_leaf: int) -> Topology:
        return Topology(
            nodes,
            8,
            device_bytes_per_s=360 * GB,
            node_bytes_per_s=400 * GB,
            cards=8,
            oversubscription=2,
            nodes_per_switch=per_leaf,
        )

    def test_halves_what_leaves_a_node_that_has_a_leaf_to_itself(self) -> None:
        assert rate(self.two_to_one(2, 1), 16) == (200, Tier.SPINE)
        assert rate(self.two_to_one(2, 1), 2, 8) == (25, Tier.SPINE)

    def test_is_not_met_under_one_leaf(self) -> None:
        assert rate(self.two_to_one(2, 2), 16) == (360, Tier.INTRA)
        assert rate(self.two_to_one(2, 2), 2, 8) == (50, Tier.INTER)

    def test_is_hidden_where_rings_leave_a_leaf_once_for_two_nodes(self) -> None:
        # Nodes 0 1 | 2 3. Up: 2 x 400 / 2 = 400 GB/s. Eight rings 0 1 2 3 leave each leaf once.
        assert rate(self.two_to_one(4, 2), 4, 8) == (50, Tier.INTER)
        assert rate(self.two_to_one(4, 2), 32) == (360, Tier.INTRA)

    def test_is_met_in_full_by_groups_whose_neighbours_are_under_other_leaves(self) -> None:
        # Sixteen rings 0 2 and 1 3: every hop leaves its leaf; 400 / 16.
        assert rate(self.two_to_one(4, 2), 2, 16) == (25, Tier.SPINE)


class TestPcie:
    """Four cards on PCIe (24 GB/s each), bridged in pairs (34 GB/s), no peer-to-peer.

    A workstation of four RTX 3090: one way of 24 GB/s to main memory for all of them.
    """

    box = Topology(
        1,
        4,
        device_bytes_per_s=24 * GB,
        pair_bytes_per_s=34 * GB,
        host_bytes_per_s=24 * GB,
        devices_per_bridge=4,
        peer_to_peer=False,
    )

    def test_a_pair_has_its_bridge(self) -> None:
        assert rate(self.box, 2) == (34, Tier.PAIR)

    def test_a_ring_of_four_passes_the_host_twice(self) -> None:
        # 0-1 and 2-3 over the bridges, 1 to 2 and 3 to 0 through main memory: 24 / 2.
        assert rate(self.box, 4) == (12, Tier.HOST)

    def test_strided_pairs_share_the_host_by_four(self) -> None:
        # 0 to 2, 2 to 0, 1 to 3, 3 to 1.
        assert rate(self.box, 2, 2) == (6, Tier.HOST)

    def test_peer_to_peer_stays_under_the_bridge(self) -> None:
        open_box = Topology(
            1, 4, device_bytes_per_s=24 * GB, host_bytes_per_s=24 * GB, devices_per_bridge=4
        )
        assert rate(open_box, 4) == (24, Tier.INTRA)
        assert rate(open_box, 2, 2) == (24, Tier.INTRA)

    def test_two_bridges_meet_at_the_host(self) -> None:
        # Devices 0-1 and 2-3: strided pairs go up from both bridges, two at once.
        two = Topology(
            1, 4, device_bytes_per_s=24 * GB, host_bytes_per_s=24 * GB, devices_per_bridge=2
        )
        assert rate(two, 4) == (24, Tier.INTRA)
        assert rate(two, 2, 2) == (12, Tier.HOST)

    def test_traffic_between_nodes_passes_the_host_without_peer_to_peer(self) -> None:
        # One card of 50 GB/s beside the bridge: each byte goes up to main memory and down again.
        nodes = Topology(
            2,
            4,
            device_bytes_per_s=24 * GB,
            node_bytes_per_s=50 * GB,
            cards=1,
            host_bytes_per_s=24 * GB,
            devices_per_bridge=4,
            peer_to_peer=False,
        )
        # Four groups at once; out: up and down, in: up and down: 24 / 8 for each.
        assert rate(nodes, 2, 4) == (3, Tier.HOST)


def test_a_full_mesh_gives_a_group_the_links_to_its_other_members() -> None:
    # MI300X: seven links of 64 GB/s a device.
    mesh = Topology(1, 8, device_bytes_per_s=448 * GB, mesh=True)
    assert rate(mesh, 8) == (448, Tier.INTRA)
    assert rate(mesh, 4) == (3 * 64, Tier.INTRA)
    assert rate(mesh, 2, 4) == (64, Tier.INTRA)


def test_a_group_of_one_uses_no_link() -> None:
    with pytest.raises(ValueError, match="uses no link"):
        Topology(2, 8).share(1)


powers = st.sampled_from([1, 2, 4, 8, 16])


@settings(deadline=None)
@given(powers, powers, powers, powers, st.floats(1, 1000), st.floats(1, 1000))
def test_plain_nodes_give_what_the_closed_form_says(
    nodes: int, per_node: int, size: int, stride: int, inside: float, between: float
) -> None:
    """min(inside, k/n of the cards) across nodes, the link's own rate inside."""
    size, stride = min(2 * size, nodes * per_node), min(stride, nodes * per_node)
    if size < 2 or size * stride > nodes * per_node:
        return
    topology = Topology(
        nodes, per_node, device_bytes_per_s=inside, node_bytes_per_s=between, cards=per_node
    )
    crosses = (size - 1) * stride >= per_node
    members = max(1, min(size, per_node // stride))
    by_hand = inside if not crosses else between * members / per_node
    if crosses and members > 1:
        by_hand = min(by_hand, inside)
    assert topology.share(size, stride).bytes_per_s == pytest.approx(by_hand)


def whole_graph(topology: Topology) -> nx.DiGraph[str]:
    """All nodes, their leaves and the spine; each direction is an edge with its `bytes_per_s`."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    for node in range(topology.num_nodes):
        leaf = f"leaf {node // topology.nodes_per_switch}"
        for one, other, rate, _ in topology._node_links():
            first, second = (leaf if v == "network" else f"{node}.{v}" for v in (one, other))
            graph.add_edges_from([(first, second), (second, first)], bytes_per_s=rate)
    leaves = -(-topology.num_nodes // topology.nodes_per_switch)
    for number in range(leaves if leaves > 1 else 0):
        leaf, rate = f"leaf {number}", topology.leaf_bytes_per_s
        graph.add_edges_from([(leaf, "spine"), ("spine", leaf)], bytes_per_s=rate)
    return graph


def routed(topology: Topology, size: int, stride: int) -> float:
    """Every ring of every group, channel by channel, along shortest paths of the whole graph."""
    graph = whole_graph(topology)
    inside = graph.subgraph(v for v in graph if "card" not in v and "leaf" not in v)
    outside = graph.subgraph(v for v in graph if "card" in v or "leaf" in v or "spine" in v)
    loads: Counter[tuple[str, str]] = Counter()
    per_node, block = topology.devices_per_node, size * stride
    world = topology.num_nodes * per_node

    def send(part: nx.DiGraph[str], one: str, other: str, share: float) -> None:
        path = nx.shortest_path(part, one, other)
        for edge in itertools.pairwise(path):
            loads[edge] += share  # type: ignore[assignment]

    def card(rank: int) -> str:
        return f"{rank // per_node}.{topology.card_of(rank % per_node)}"

    for start in range(0, world // block * block, block):
        for first in range(stride):
            members: dict[int, list[int]] = {}
            for rank in range(start + first, start + first + block, stride):
                members.setdefault(rank // per_node, []).append(rank)
            way = list(members.values())
            for here in way:
                for one, other in zip(here, (*here[1:], here[0]), strict=True):
                    if one != other:
                        names = [f"{r // per_node}.device {r % per_node}" for r in (one, other)]
                        send(inside, *names, 1.0)
            channels = lcm(*(len(here) for here in way)) if len(way) > 1 else 0
            for here, following in zip(way, (*way[1:], way[0]), strict=True):
                for c in range(channels):
                    leaves, enters = here[c % len(here)], following[c % len(following)]
                    send(outside, card(leaves), card(enters), 1 / channels)
    return min(graph.edges[edge]["bytes_per_s"] / load for edge, load in loads.items())


@settings(max_examples=60, deadline=None)
@given(
    nodes=st.integers(1, 6),
    per_node=st.integers(1, 6),
    size=st.integers(2, 12),
    stride=st.integers(1, 12),
    cards=st.integers(1, 6),
    oversubscription=st.sampled_from([1.0, 1.5, 4.0]),
    per_leaf=st.integers(1, 3),
    bridge=st.none() | st.integers(1, 4),
)
def test_one_node_of_each_kind_is_enough(
    nodes: int,
    per_node: int,
    size: int,
    stride: int,
    cards: int,
    oversubscription: float,
    per_leaf: int,
    bridge: int | None,
) -> None:
    if size * stride > nodes * per_node:
        return
    topology = Topology(
        nodes,
        per_node,
        device_bytes_per_s=100.0,
        node_bytes_per_s=70.0,
        cards=cards,
        oversubscription=oversubscription,
        nodes_per_switch=per_leaf,
        host_bytes_per_s=90.0 if bridge else None,
        devices_per_bridge=bridge or 1,
    )
    share = topology.share(size, stride)
    if bridge and share.tier is Tier.HOST and nodes > 1:
        return  # a card under another device's bridge: its way through the host is not in `routed`
    whole = routed(topology, size, stride)
    if bridge:
        assert share.bytes_per_s <= whole * (1 + 1e-9)
    else:
        assert share.bytes_per_s == pytest.approx(whole)


def test_a_profile_s_fields_decide() -> None:
    plain = gpus(2, 8)
    assert plain.group_bandwidth(2, 8).value == 50 * GB
    crowded = plain.model_copy(update={"oversubscription": 2.0})
    assert crowded.group_bandwidth(16).value == 200 * GB
    assert crowded.bottleneck(16).name == "InfiniBand, 2:1 oversubscribed"
    bridged = plain.model_copy(
        update={
            "pair": link("NVLink bridge", 34 * GB),
            "intra": link("PCIe4 x16", 24 * GB),
            "host_bridge": HostBridge(link=link("root", 24 * GB), devices=8, peer_to_peer=False),
        }
    )
    assert bridged.bottleneck(2).name == "NVLink bridge"
    assert bridged.bottleneck(8).name == "root"
    # Four of eight hops pass the host: 1 to 2, 3 to 4, 5 to 6, 7 to 0.
    assert bridged.group_bandwidth(8).value == 6 * GB


def test_measured_rates_are_not_reduced_by_the_topology() -> None:
    fit = LinkFit(latency_s=1e-5, busbw_bytes_per_s=20 * GB)
    timed = {Collective.ALL_REDUCE: fit}
    plain = gpus(2, 8, intra_bytes_per_s=24 * GB)
    assert plain.intra is not None
    assert plain.inter is not None
    box = plain.model_copy(
        update={
            "oversubscription": 2.0,
            "host_bridge": HostBridge(link=link("root", 8 * GB), devices=8, peer_to_peer=False),
        }
    )
    assert box.group_bandwidth(8).value == GB
    assert box.group_bandwidth(2, 8).value == pytest.approx(0.5 * GB)  # 16 ways through the host
    measured = box.model_copy(
        update={
            "intra": plain.intra.model_copy(update={"fits": timed}),
            "inter": plain.inter.model_copy(update={"fits": timed}),
        }
    )
    assert measured.group_bandwidth(8).value == 24 * GB
    assert measured.group_bandwidth(2, 8).value == 50 * GB


def test_shares_of_a_thousand_devices_are_few_calls() -> None:
    big = Topology(128, 8, device_bytes_per_s=369e9, node_bytes_per_s=372e9, cards=7)

    def every() -> int:
        groups = [(size, stride) for size in range(1, 11) for stride in range(11 - size)]
        return len([big.share(2**size, 2**stride) for size, stride in groups])

    groups, calls = count_calls(every)
    assert calls < 2000 * groups


def test_a_hundred_thousand_nodes_share_as_four_do_and_as_fast() -> None:
    def shares(nodes: int) -> list[Share]:
        rates = {"device_bytes_per_s": 369e9, "node_bytes_per_s": 400e9, "cards": 8}
        there = Topology(nodes, 8, **rates)
        groups = ((nodes, 8), (nodes * 8, 1), (8, 1), (nodes * 4, 2))
        return [there.share(size, stride) for size, stride in groups]

    few, calls = count_calls(lambda: shares(4))
    many, calls_of_many = count_calls(lambda: shares(100_000))
    assert many == few
    assert many[:3] == [Share(50e9, Tier.INTER), *[Share(369e9, Tier.INTRA)] * 2]
    assert calls_of_many < 1.1 * calls


def test_shares_compare_by_value() -> None:
    assert Topology(2, 8, node_bytes_per_s=400.0, cards=8).share(2, 8) == Share(50.0, Tier.INTER)


def test_the_first_and_last_rank_share_links_like_neighbouring_halves() -> None:
    """Ranks 0 and 7 of one node: there is no second such pair, and no way out of the node."""
    node = Topology(1, 8, device_bytes_per_s=360e9, node_bytes_per_s=400e9, cards=8)
    assert node.share(2, 7) == node.share(2, 4)
    assert node.share(2, 7).tier is Tier.INTRA
    nodes = Topology(4, 8, device_bytes_per_s=360e9, node_bytes_per_s=400e9, cards=8)
    assert nodes.share(2, 24) == nodes.share(2, 16)
    assert nodes.share(2, 24).tier is Tier.INTER
