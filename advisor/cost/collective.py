"""Seconds of one collective on given machines."""

from __future__ import annotations

from math import ceil, log2

from profiles.cluster import ClusterProfile, Collective


def collective_s(
    cluster: ClusterProfile,
    kind: Collective,
    payload_bytes: float,
    *,
    group_size: int,
    stride: int = 1,
    trees: bool = True,
) -> float:
    """Seconds of one collective: latency + bus_factor * bytes / bus bandwidth.

    A measured fit of this collective takes precedence: of exactly this axis, then of the tier.
    Otherwise a ring pays one latency for each of its steps, over the tier that the step uses; an
    all-reduce takes two rings or, where cheaper, a tree over the nodes (NCCL's two shapes; without
    `trees`, as before NCCL 2.4, only rings).
    """
    if group_size < 2:
        return 0.0
    bus_bytes = kind.bus_factor(group_size) * payload_bytes
    exact = cluster.measured(kind, group_size, stride)
    if exact is not None:
        return exact.latency_s + bus_bytes / exact.busbw_bytes_per_s
    link = cluster.link(group_size, stride)
    bandwidth = cluster.group_bandwidth(group_size, stride).value
    fit = link.fits.get(kind)
    if fit is not None:
        # The fit saw all ranks of a node share its cards; a sparser group gets its part of them.
        part = min(1.0, bandwidth / cluster.group_bandwidth(cluster.world_size).value)
        part = part if cluster.crosses_nodes(group_size, stride) else 1.0
        return fit.latency_s + bus_bytes / (fit.busbw_bytes_per_s * part)
    per_node = cluster.ranks_per_node(group_size, stride)
    nodes = ceil(group_size / per_node)
    inside = cluster.intra.latency_s.value if cluster.intra is not None else 0.0
    between = cluster.inter.latency_s.value if cluster.inter is not None else 0.0
    # A ring enters each node once; its other steps stay inside.
    ring = (group_size - nodes) * inside + (nodes - 1) * between
    if kind is Collective.ALL_REDUCE:
        rings_s = 2 * ring + bus_bytes / bandwidth
        if not trees:
            return rings_s
        shape = {"per_node": per_node, "nodes": nodes, "stride": stride}
        return min(rings_s, _tree_s(cluster, payload_bytes, **shape))
    if kind is Collective.SEND_RECV:
        ring = between if nodes > 1 else inside
    return ring + bus_bytes / bandwidth


def _tree_s(
    cluster: ClusterProfile, payload_bytes: float, *, per_node: int, nodes: int, stride: int
) -> float:
    """An all-reduce over a tree of nodes: what is sent between them does not grow with the ranks.

    A ring of n ranks puts 2(n-1)/n of the payload on a node's cards, double binary trees over N
    nodes 2(N-1)/N: on two nodes of eight 1 instead of 1.9, which is why published two-node figures
    exceed the rate of the cards.
    """
    latency = inside_s = between_s = 0.0
    if cluster.intra is not None and per_node > 1:
        latency += 2 * (per_node - 1) * cluster.intra.latency_s.value
        inside = cluster.group_bandwidth(per_node, stride).value
        inside_s = Collective.ALL_REDUCE.bus_factor(per_node) * payload_bytes / inside
    if cluster.inter is not None and nodes > 1:
        latency += 2 * log2(nodes) * cluster.inter.latency_s.value
        # What one rank of every node gets while its neighbours talk too, times those of the group.
        apart = max(stride, cluster.devices_per_node)
        between = per_node * cluster.group_bandwidth(nodes, apart).value
        between_s = Collective.ALL_REDUCE.bus_factor(nodes) * payload_bytes / between
    return latency + max(inside_s, between_s)
