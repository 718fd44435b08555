"""Cluster of a manually placed module: each rank drives several devices."""

from __future__ import annotations

from advisor.inputs.resize import resized
from profiles.errors import InputError
from profiles.machine.cluster import ClusterProfile
from profiles.model.profile import ModelProfile


def with_parts(cluster: ClusterProfile, model: ModelProfile) -> ClusterProfile:
    """Return `cluster` with a rank per group of `parts` devices; unchanged for a module on one
    device.

    The memory of a rank's devices counts as one, since the placement is the author's. A cluster
    that has `parts` already counts a rank's devices as one.

    Raises:
        InputError: a node has fewer devices than the module has parts.
    """
    count = sum(not device.startswith("cpu") for device in model.devices)
    if count < 2 or cluster.device.kind == "cpu":  # processors share the machine's memory
        return cluster
    ranks, parts = cluster.devices_per_node, cluster.parts
    if parts is None:
        if ranks < count:
            raise InputError(
                f"the parts of {model.name} are on {count} devices of a process, a node of"
                f" {cluster.name} has {ranks}",
                hints=[f"name machines with {count} devices a node or more"],
            )
        ranks //= count
        parts = resized(cluster, count) if cluster.world_size != count else cluster
    device = cluster.device
    totals = {  # each device has its own context
        name: quantity.model_copy(update={"value": quantity.value * count})
        for name, quantity in (
            ("memory_bytes", device.memory_bytes),
            ("context_bytes", device.context_bytes),
        )
    }
    note = (
        f"{model.name} is split by hand over {count} devices a rank: their memory is added up, one"
        " of them computes at a time"
    )
    return cluster.model_copy(
        update={
            "devices_per_node": ranks,
            "intra": cluster.intra if ranks > 1 else None,
            "device": device.model_copy(update=totals),
            "parts": parts,
            "notes": (*cluster.notes, note),
        }
    )
