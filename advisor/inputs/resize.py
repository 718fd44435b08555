"""Same kind of cluster with another number of devices."""

from __future__ import annotations

from collections.abc import Iterator

from advisor.inputs.facts import Facts
from profiles.errors import InputError
from profiles.machine.cluster import ClusterProfile

# More devices than the largest published runs used indicate a mistake: Llama 3 405B took 16,384
# (arXiv:2407.21783).
MOST_DEVICES = 16_384


def resized(cluster: ClusterProfile, devices: int) -> ClusterProfile:
    """Return some devices of one node, or several whole nodes, of the kind of `cluster`.

    Measurements are kept for groups that still exist.

    Raises:
        InputError: part of a node beside whole ones; or several, and no network is known.
    """
    per_node = cluster.devices_per_node
    name = f"{devices} of {cluster.name}"
    if devices == cluster.world_size:
        return cluster
    if devices <= per_node:
        inside = {"devices_per_node": devices, "num_nodes": 1, "inter": None, "name": name}
        if devices == 1:
            inside["intra"] = None
        return cluster.model_copy(update=inside)
    if devices % per_node:
        nodes = devices // per_node
        raise InputError(
            f"{devices} devices are no whole nodes of {per_node}",
            hints=[f"{nodes * per_node} or {(nodes + 1) * per_node} are"],
        )
    if cluster.inter is None:
        raise InputError(
            f"{devices} devices are {devices // per_node} nodes, and nothing is known of a network",
            hints=["name two nodes or more, as `2x8xH100-SXM-80GB`, or give `inter` in a file"],
        )
    return cluster.model_copy(update={"num_nodes": devices // per_node, "name": name})


def counts(cluster: ClusterProfile, most: int) -> Iterator[int]:
    """Yield valid numbers of devices, ascending: within one node, then whole nodes."""
    per_node = cluster.devices_per_node
    yield from range(1, min(per_node, most) + 1)
    if cluster.inter is not None:
        yield from range(2 * per_node, most + 1, per_node)


def on(facts: Facts, devices: int, *, batch: int | None = None) -> Facts:
    """Return `facts` on so many devices, and with another batch if given."""
    workload = facts.workload
    if batch is not None:
        workload = workload.model_copy(update={"global_batch_size": batch})
    return facts.rebuilt(cluster=resized(facts.cluster, devices), workload=workload)


def next_multiple(number: int, of: int) -> int:
    """
    >>> next_multiple(128, 12)
    132
    """
    return -(-number // of) * of


def devices_in_words(count: int) -> str:
    """
    >>> devices_in_words(1)
    '1 device'
    """
    return f"{count} device" + ("s" if count != 1 else "")
