"""Time of one collective on a given cluster."""

from __future__ import annotations

from math import ceil, log2
from typing import NamedTuple

from profiles.machine.cluster import ClusterProfile, Collective


class Algorithm(NamedTuple):
    """Time of a collective's algorithm: latency + payload * seconds per byte."""

    latency_s: float
    s_per_byte: float

    def seconds(self, payload_bytes: float) -> float:
        return self.latency_s + payload_bytes * self.s_per_byte


def algorithms(
    cluster: ClusterProfile, kind: Collective, *, group_size: int, stride: int = 1
) -> tuple[Algorithm, ...]:
    """Algorithms of a collective: latency + bus_factor * bytes / bus bandwidth.

    A measured fit of this collective takes precedence: of exactly this axis, then of the tier.
    Otherwise a ring pays one latency per step, of the tier that the step uses; an all-reduce takes
    two rings or, if cheaper, a tree over the nodes (as NCCL does); in an all-to-all the ranks of a
    node share its network cards.
    """
    if group_size < 2:
        return (Algorithm(0.0, 0.0),)
    factor = kind.bus_factor(group_size)
    exact = cluster.measured(kind, group_size, stride)
    if exact is not None:
        return (Algorithm(exact.latency_s, factor / exact.busbw_bytes_per_s),)
    link = cluster.link(group_size, stride)
    bandwidth = cluster.group_bandwidth(group_size, stride).value
    fit = link.fits.get(kind)
    if fit is not None:
        # The fit included contention of all ranks of a node; a sparser group gets its share of the
        # cards.
        part = min(1.0, bandwidth / cluster.group_bandwidth(cluster.world_size).value)
        part = part if cluster.crosses_nodes(group_size, stride) else 1.0
        return (Algorithm(fit.latency_s, factor / (fit.busbw_bytes_per_s * part)),)
    per_node = cluster.ranks_per_node(group_size, stride)
    nodes = ceil(group_size / per_node)
    inside = cluster.intra.latency_s.value if cluster.intra is not None else 0.0
    between = cluster.inter.latency_s.value if cluster.inter is not None else 0.0
    # A ring enters each node once; its other steps stay inside.
    ring = (group_size - nodes) * inside + (nodes - 1) * between
    if kind is Collective.ALL_REDUCE:
        tree = _tree(cluster, per_node=per_node, nodes=nodes, stride=stride)
        return Algorithm(2 * ring, factor / bandwidth), tree
    if kind is Collective.ALL_TO_ALL and nodes > 1:
        share = _all_to_all_s_per_byte(cluster, per_node=per_node, nodes=nodes, stride=stride)
        return (Algorithm(ring, share),)
    if kind is Collective.SEND_RECV:
        ring = between if nodes > 1 else inside
    return (Algorithm(ring, factor / bandwidth),)


def _all_to_all_s_per_byte(
    cluster: ClusterProfile, *, per_node: int, nodes: int, stride: int
) -> float:
    """Seconds per byte of an all-to-all over several nodes.

    A ring enters each node once; here every rank sends N - 1 of N parts to other nodes, and the
    ranks of a node share its network cards. Transfers inside nodes overlap with these.
    """
    card = cluster.group_bandwidth(nodes, max(stride, cluster.domain_devices)).value
    seconds = (nodes - 1) / nodes / card
    if per_node > 1 and cluster.intra is not None:
        link = cluster.group_bandwidth(per_node, stride).value
        seconds = max(seconds, (per_node - 1) / (per_node * nodes) / link)
    return seconds


def _tree(cluster: ClusterProfile, *, per_node: int, nodes: int, stride: int) -> Algorithm:
    """All-reduce over a tree of nodes: inter-node traffic does not grow with the number of ranks.

    A ring of n ranks puts 2(n-1)/n of the payload on a node's cards, double binary trees over N
    nodes 2(N-1)/N: on two nodes of eight 1 instead of 1.9, which is why published two-node figures
    exceed the rate of the cards.
    """
    latency = inside_s = between_s = 0.0
    if cluster.intra is not None and per_node > 1:
        latency += 2 * (per_node - 1) * cluster.intra.latency_s.value
        inside = cluster.group_bandwidth(per_node, stride).value
        inside_s = Collective.ALL_REDUCE.bus_factor(per_node) / inside
    if cluster.inter is not None and nodes > 1:
        latency += 2 * log2(nodes) * cluster.inter.latency_s.value
        # Bandwidth of one rank per node while its neighbors send too, times the group's ranks.
        stride_between = max(stride, cluster.domain_devices)
        between = per_node * cluster.group_bandwidth(nodes, stride_between).value
        between_s = Collective.ALL_REDUCE.bus_factor(nodes) / between
    return Algorithm(latency, max(inside_s, between_s))
