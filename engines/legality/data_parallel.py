"""Rules of `nn.DataParallel`. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from engines.legality.problem import Problem
from engines.plan import MODEL_AXES, DataParallel, Plan
from profiles.machine.cluster import ClusterProfile
from profiles.model.profile import ModelProfile


def threads(plan: Plan, model: ModelProfile, cluster: ClusterProfile) -> Iterator[Problem]:
    """Accelerators of one node, each with a replica that every forward copies anew."""
    if plan.data_parallel is not DataParallel.THREADS:
        return
    better = "one process per device is faster: use dp_replicate without data_parallel"
    if cluster.device.kind == "cpu":
        yield Problem(
            rule="threads-processors",
            what=f"data_parallel=threads drives accelerators, {cluster.name} has processors:"
            " nn.DataParallel would call the module itself there",
            hint=better,
        )
    if plan.dp_replicate > cluster.devices_per_node:
        yield Problem(
            rule="threads-across-nodes",
            what=f"threads of one process reach the {cluster.devices_per_node} devices of its node,"
            f" dp_replicate is {plan.dp_replicate}",
            hint=better,
        )
    others = plan.said(*MODEL_AXES, *_OF_PROCESSES)
    if others or model.devices:
        yield Problem(
            rule="threads-alone",
            what="nn.DataParallel copies the plain module from its first device: it goes with"
            f" nothing else, the plan has {others or 'parts on several devices'}",
            hint=better,
        )


_OF_PROCESSES = ("sync_batch_norm", "compile", "compression", "updates", "servers", "loss_chunks")
