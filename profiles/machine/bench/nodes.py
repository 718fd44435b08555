"""A job's machines as all its nodes see them."""

from __future__ import annotations

from profiles.machine.bench.job import Job
from profiles.machine.cluster import ClusterProfile
from profiles.machine.mixed_nodes import slowest_of
from profiles.provenance import Quantity

# Equal machines report memory that differs by what firmware and kernel keep, a per cent or so.
EQUAL_MEMORY = 0.05


def of_all_nodes(job: Job, cluster: ClusterProfile) -> ClusterProfile:
    """One profile on every rank: rank 0's where nodes are equal, else that of the slowest ones.

    Args:
        cluster: as this rank's node sees the job; the first rank of each node is heard.

    Raises:
        InputError: nodes whose devices cannot be in one job.
    """
    first = ClusterProfile.from_json(job.of_rank(0, cluster.to_json()), where="rank 0")
    seen = [first]
    for source in range(first.devices_per_node, job.ranks, first.devices_per_node):
        text = job.of_rank(source, cluster.to_json())
        seen.append(ClusterProfile.from_json(text, where=f"rank {source}"))
    return first if all(_are_alike(first, other) for other in seen) else slowest_of(seen)


def _are_alike(one: ClusterProfile, other: ClusterProfile) -> bool:
    return (
        one.device.name == other.device.name
        and one.devices_per_node == other.devices_per_node
        and _is_near(one.device.memory_bytes, other.device.memory_bytes)
        and _is_near(one.host_memory_bytes, other.host_memory_bytes)
    )


def _is_near(one: Quantity | None, other: Quantity | None) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one.value - other.value) <= EQUAL_MEMORY * max(one.value, other.value)
