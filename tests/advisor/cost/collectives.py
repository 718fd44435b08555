"""Seconds of one collective."""

from __future__ import annotations

from advisor.cost.collective import algorithms
from profiles.machine.cluster import ClusterProfile, Collective


def collective_s(
    cluster: ClusterProfile,
    kind: Collective,
    payload_bytes: float,
    *,
    group_size: int,
    stride: int = 1,
) -> float:
    """With the fastest of its `algorithms`."""
    options = algorithms(cluster, kind, group_size=group_size, stride=stride)
    return min(each.seconds(payload_bytes) for each in options)
