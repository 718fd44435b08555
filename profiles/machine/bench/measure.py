"""The whole bench of a job: device, links, and how they disturb each other, as a profile."""

from __future__ import annotations

import torch.distributed as dist

from profiles.errors import InputError
from profiles.machine.bench.axes import mesh_axes
from profiles.machine.bench.collectives import (
    CPU_LARGEST_BYTES,
    GPU_LARGEST_BYTES,
    Tell,
    axis_times,
)
from profiles.machine.bench.contention import contention
from profiles.machine.bench.device import timed_device
from profiles.machine.bench.disturbed import Disturbance
from profiles.machine.bench.job import joined, require_group
from profiles.machine.bench.links import network_link, node_link
from profiles.machine.bench.nodes import of_all_nodes
from profiles.machine.bench.shared_cores import shared_cores
from profiles.machine.cluster import AxisFits, ClusterProfile

BUDGET_S = 20.0
# Time that a rank may be late before the others give up, beyond the budget.
PATIENCE_S = 60.0
DEVICE_SHARE, CORES_SHARE, CONTENTION_SHARE = 0.2, 0.05, 0.1


def bench(
    cluster: ClusterProfile,
    *,
    budget_s: float = BUDGET_S,
    max_bytes: int | None = None,
    tell: Tell = lambda what: None,
) -> ClusterProfile:
    """`cluster` with this job's measured speeds in place of its own; the same on every rank.

    What is timed is what training will meet: all ranks work at the same moment, so processor ranks
    share their cores and groups share the network. Collectives run on every mesh axis of one or two
    (`axes`; see `profiles.machine.bench.axes`), in all groups of the axis at once. Two of them
    stand for the tiers: all ranks of a node (`intra`), and one rank of every node (`inter`: figures
    are for the whole node). A link's own bandwidth is that of the fastest ring collective, its
    range holds the others; its latency is that of a send.

    Args:
        cluster: of this job, from `probe`, as this rank's node sees it; see `of_all_nodes`.
        budget_s: wall time to spend, about; large messages are left out where it is short.
        max_bytes: largest message, 256 KiB at least; by default 64 MiB, on GPUs 1 GiB.
        tell: called on every rank with what is being timed.

    Raises:
        InputError: no process group, or a cluster of another size than the job.
        RankError: a rank did not answer in time, or broke off; it is named.
    """
    if cluster.world_size > 1:
        require_group()
    world = dist.get_world_size() if dist.is_initialized() else 1
    if cluster.world_size != world:
        raise InputError(
            f"the cluster has {cluster.world_size} devices, this job {world} ranks",
            where=f"cluster `{cluster.name}`",
        )
    with joined(patience_s=budget_s + PATIENCE_S) as job:
        cluster = of_all_nodes(job, cluster)
        nodes, per_node = cluster.num_nodes, cluster.devices_per_node
        disturbance = Disturbance(ranks_per_node=per_node)
        tell("matrix products and memory")
        device = timed_device(job, cluster.device, budget_s=budget_s * DEVICE_SHARE)
        note = disturbance.note(job)
        tell("ranks that compute alone")
        shared = shared_cores(job, ranks_per_node=per_node, budget_s=budget_s * CORES_SHARE)
        tell("computing and communication at once")
        overlap = contention(job, budget_s=budget_s * CONTENTION_SHARE)
        if max_bytes is None:
            max_bytes = GPU_LARGEST_BYTES if job.device.type == "cuda" else CPU_LARGEST_BYTES
        times = axis_times(
            job,
            mesh_axes(num_nodes=nodes, devices_per_node=per_node),
            budget_s=budget_s - job.elapsed_s(),
            largest_bytes=max_bytes,
            tell=tell,
        )
        update: dict[str, object] = {
            "device": device,
            "notes": (*cluster.notes, *([note] if note else [])),
            "overlap": overlap,
            "shared_cores": shared,
            "axes": tuple(
                AxisFits(group_size=axis.size, stride=axis.stride, fits=timed.fits)
                for axis, timed in sorted(times.items(), key=lambda item: item[0])
            ),
        }
        if per_node > 1:
            update["intra"] = node_link(cluster.intra, times, devices_per_node=per_node)
        if nodes > 1:
            update["inter"] = network_link(
                cluster.inter, times, num_nodes=nodes, devices_per_node=per_node
            )
        benched = cluster.model_copy(update=update)
        return ClusterProfile.from_json(job.of_rank(0, benched.to_json()), where="rank 0")
