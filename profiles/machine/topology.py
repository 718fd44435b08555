"""Bandwidth that a group of ranks gets, from the graph of devices, cards and switches.

A ring over each group of a mesh axis is routed through the graph of a cluster, all groups at once;
the load on every edge is counted, and the edge that is slowest for what it carries decides:

    device -- switch -- device         NVSwitch: any device to any other at its own rate
    device -- device                   a full mesh (xGMI), or an NVLink bridge between two cards
    device -- bridge -- host           PCIe: the devices of a bridge share its way to the host
    device -- card -- leaf -- spine    between nodes; oversubscribed: less goes up than comes down

A ring of k ranks in a node that goes on to other nodes runs in k channels, one through the card
beside each of them. What comes in by a card leaves by the same one (NCCL_CROSS_NIC=0; PXN hands it
over inside the node), so in a node the ring is closed: every rank sends at the full rate inside,
and a k-th of it through its card. In a full mesh a ring runs in every order of its ranks at once,
an equal part of it over each pair.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import networkx as nx

_Edge = tuple[str, str]
_HOST, _SWITCH, _NETWORK = "host", "switch", "network"


class Tier(StrEnum):
    """Kind of link of an edge."""

    INTER = "inter"  # network cards
    SPINE = "spine"  # from a switch between nodes up to the others
    INTRA = "intra"  # a device's links inside its node
    PAIR = "pair"  # a bridge between two cards
    HOST = "host"  # a PCIe bridge's way to the host

    @property
    def is_inside(self) -> bool:
        """True if the link joins devices of one node."""
        return self not in (Tier.INTER, Tier.SPINE)


@dataclass(frozen=True, slots=True)
class Share:
    """Bandwidth of each group of an axis: bus bandwidth in bytes/s, and the tier that bounds it."""

    bytes_per_s: float
    tier: Tier


@dataclass(frozen=True, slots=True)
class Topology:
    """Equal nodes, as plain numbers; every rate is of one direction, infinite where nothing limits.

    Attributes:
        device_bytes_per_s: of one device inside its node, all its links together.
        node_bytes_per_s: of all network cards of a node together.
        mesh: the devices of a node are joined each with each, not by a switch.
        cards: network cards of a node; device i uses the one beside it, card i * cards // devices.
        oversubscription: what comes down to a leaf's nodes over what goes up from it, 1 or more.
        nodes_per_switch: nodes under one leaf.
        pair_bytes_per_s: of a bridge that joins devices 2i and 2i + 1; None where there is none.
        host_bytes_per_s: of a PCIe bridge's way to the host; None where devices are not on PCIe
            bridges.
        devices_per_bridge: devices that share a PCIe bridge.
        peer_to_peer: whether devices reach each other, and cards, without passing the host.
    """

    num_nodes: int
    devices_per_node: int
    device_bytes_per_s: float = inf
    node_bytes_per_s: float = inf
    mesh: bool = False
    cards: int = 1
    oversubscription: float = 1.0
    nodes_per_switch: int = 1
    pair_bytes_per_s: float | None = None
    host_bytes_per_s: float | None = None
    devices_per_bridge: int = 1
    peer_to_peer: bool = True

    def share(self, group_size: int, stride: int = 1) -> Share:
        """Return the bandwidth of each group of `group_size` ranks, `stride` apart, while all
        communicate.

        Ranks too far apart for blocks of such groups (the first and the last stage of a pipeline,
        which hold a tied weight) are taken to be as far apart as blocks allow.

        >>> Topology(2, 8, device_bytes_per_s=360e9, node_bytes_per_s=400e9, cards=8).share(2, 8)
        Share(bytes_per_s=50000000000.0, tier=<Tier.INTER: 'inter'>)

        Raises:
            ValueError: a group of one rank uses no link.
        """
        widest = self.num_nodes * self.devices_per_node // max(group_size, 1)
        return _share(self, group_size, max(1, min(stride, widest)))

    def card_of(self, device: int) -> str:
        """The card beside a device; where there are more cards, as many as make one a device."""
        return f"card {device * min(self.cards, self.devices_per_node) // self.devices_per_node}"

    def bridge_of(self, device: int) -> str:
        return f"bridge {device // self.devices_per_bridge}"

    @property
    def leaf_bytes_per_s(self) -> float:
        """Bandwidth from the nodes of one leaf to those of other leaves."""
        return self.node_bytes_per_s * self.nodes_per_switch / self.oversubscription

    def _node_links(self) -> Iterator[tuple[str, str, float, Tier]]:
        """Yield the links inside one node, and of its cards to the network; both directions."""
        devices = range(self.devices_per_node)
        if self.host_bytes_per_s is not None:
            for i in devices:
                yield _device(i), self.bridge_of(i), self.device_bytes_per_s, Tier.INTRA
            for bridge in sorted({self.bridge_of(i) for i in devices}):
                yield bridge, _HOST, self.host_bytes_per_s, Tier.HOST
        elif self.mesh and self.devices_per_node > 1:
            rate = self.device_bytes_per_s / (self.devices_per_node - 1)
            for i in devices:
                for j in range(i):
                    yield _device(j), _device(i), rate, Tier.INTRA
        elif self.devices_per_node > 1:
            for i in devices:
                yield _device(i), _SWITCH, self.device_bytes_per_s, Tier.INTRA
        if self.pair_bytes_per_s is not None:
            for i in range(1, self.devices_per_node, 2):
                yield _device(i - 1), _device(i), self.pair_bytes_per_s, Tier.PAIR
        if self.num_nodes > 1:
            rate = self.node_bytes_per_s / min(self.cards, self.devices_per_node)
            users_of_card: dict[str, list[int]] = {}
            for i in devices:
                users_of_card.setdefault(self.card_of(i), []).append(i)
            for card, users in users_of_card.items():
                if self.host_bytes_per_s is not None:
                    yield self.bridge_of(users[0]), card, rate, Tier.INTER
                else:
                    for i in users:
                        yield _device(i), card, rate, Tier.INTER
                yield card, _NETWORK, rate, Tier.INTER


@dataclass(frozen=True, slots=True)
class _Part:
    """The ranks that a group has on one node, in the ring's order, and whether it goes on."""

    devices: tuple[int, ...]
    goes_on: bool


@lru_cache(maxsize=4096)
def _share(topology: Topology, group_size: int, stride: int) -> Share:
    if group_size < 2:
        raise ValueError("a group of one rank uses no link")
    on_node = _parts(topology, group_size, stride)
    slowest: list[tuple[float, int, Tier]] = []
    edges = _edges(topology)
    for parts in on_node:
        for edge, load in _loads(topology, parts).items():
            rate, tier = edges[edge]
            slowest.append((rate / float(load), list(Tier).index(tier), tier))
    if topology.oversubscription > 1:
        most = max(_leaf_loads(topology, _ways(topology, group_size, stride)).values(), default=0)
        if most:
            up = topology.leaf_bytes_per_s / most
            slowest.append((up, list(Tier).index(Tier.SPINE), Tier.SPINE))
    rate, _, tier = min(slowest)
    return Share(rate, tier)


def _parts(topology: Topology, group_size: int, stride: int) -> set[tuple[_Part, ...]]:
    """The different ways in which nodes are shared.

    Nodes that the groups share in the same way carry the same, so one of each kind is enough.
    Groups are those of a mesh: blocks of `group_size * stride` ranks, from the first rank on.
    """
    per_node, block = topology.devices_per_node, group_size * stride
    world = _ranks(topology, block)
    if block % per_node == 0 and (per_node % stride == 0 or stride % per_node == 0):
        world = per_node  # nodes lie in whole strides or strides in whole nodes: all alike
    by_node: dict[int, dict[int, list[int]]] = {}
    for rank in range(world):
        node, device = divmod(rank, per_node)
        by_node.setdefault(node, {}).setdefault(_group(rank, block, stride), []).append(device)

    def goes_on(group: int) -> bool:
        first = group // stride * block + group % stride
        return first // per_node != (first + block - stride) // per_node

    return {
        tuple(_Part(tuple(devices), goes_on(group)) for group, devices in groups.items())
        for groups in by_node.values()
    }


def _ways(topology: Topology, group_size: int, stride: int) -> list[list[int]]:
    """The nodes of each group, in the ring's order."""
    ways: dict[int, list[int]] = {}
    for rank in range(_ranks(topology, group_size * stride)):
        way = ways.setdefault(_group(rank, group_size * stride, stride), [])
        node = rank // topology.devices_per_node
        if not way or way[-1] != node:
            way.append(node)
    return list(ways.values())


def _ranks(topology: Topology, block: int) -> int:
    """Those in whole blocks; one block at least."""
    return max(topology.num_nodes * topology.devices_per_node // block, 1) * block


def _group(rank: int, block: int, stride: int) -> int:
    return rank // block * stride + rank % stride


def _loads(topology: Topology, parts: tuple[_Part, ...]) -> dict[_Edge, Fraction]:
    """Times that each edge of a node carries the bytes that one rank of a ring sends."""
    loads: dict[_Edge, Fraction] = defaultdict(Fraction)
    for part in parts:
        count = len(part.devices)
        if count > 1:
            for one, other, share in _hops(topology, part.devices):
                for edge in _route(topology, _device(one), _device(other)):
                    loads[edge] += share
        if part.goes_on:
            for device in part.devices:
                way = _way_out(topology, device)
                for edge in (*way, *((other, one) for one, other in way)):
                    loads[edge] += Fraction(1, count)
    return loads


def _hops(topology: Topology, devices: tuple[int, ...]) -> Iterator[tuple[int, int, Fraction]]:
    if topology.mesh:
        share = Fraction(1, len(devices) - 1)
        yield from ((i, j, share) for i in devices for j in devices if i != j)
        return
    for i, j in zip(devices, (*devices[1:], devices[0]), strict=True):
        yield i, j, Fraction(1)


def _leaf_loads(topology: Topology, ways: list[list[int]]) -> Counter[int]:
    """Number of rings that leave each leaf; as many enter."""
    loads: Counter[int] = Counter()
    for way in ways:
        for node, following in zip(way, (*way[1:], way[0]), strict=True):
            leaf = node // topology.nodes_per_switch
            loads[leaf] += leaf != following // topology.nodes_per_switch
    return loads


@lru_cache(maxsize=64)
def _edges(topology: Topology) -> dict[_Edge, tuple[float, Tier]]:
    edges = {}
    for one, other, rate, tier in topology._node_links():
        edges[one, other] = edges[other, one] = (rate, tier)
    return edges


@lru_cache(maxsize=64)
def _inside(topology: Topology) -> nx.DiGraph[str]:
    """One node without its cards: no way between two of its devices leads through the network."""
    import networkx as nx

    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_edges_from(
        edge for edge, (_, tier) in _edges(topology).items() if tier is not Tier.INTER
    )
    return graph


@lru_cache(maxsize=4096)
def _route(topology: Topology, one: str, other: str) -> tuple[_Edge, ...]:
    """The edges from one part of a node to another: what joins them, else the shortest way."""
    if (one, other) in _edges(topology):
        return ((one, other),)
    if topology.host_bytes_per_s is None:
        # All hang on one switch: nothing to search, and no library to load for it.
        return ((one, _SWITCH), (_SWITCH, other))
    if not topology.peer_to_peer and other != _HOST:
        return _through_host(topology, one, other)
    import networkx as nx

    return tuple(pairwise(nx.shortest_path(_inside(topology), one, other)))


def _through_host(topology: Topology, one: str, other: str) -> tuple[_Edge, ...]:
    down = ((b, a) for a, b in reversed(_route(topology, other, _HOST)))
    return (*_route(topology, one, _HOST), *down)


@lru_cache(maxsize=1024)
def _way_out(topology: Topology, device: int) -> tuple[_Edge, ...]:
    """From a device through the card beside it to the network."""
    own, card = _device(device), topology.card_of(device)
    if topology.host_bytes_per_s is None:
        return ((own, card), (card, _NETWORK))
    bridge = next(one for one, other in _edges(topology) if other == card and one != _NETWORK)
    to_bridge = _route if topology.peer_to_peer else _through_host
    return (*to_bridge(topology, own, bridge), (bridge, card), (card, _NETWORK))


def _device(index: int) -> str:
    return f"device {index}"
