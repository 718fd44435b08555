"""Rules of modules that their authors placed on several devices. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from engines.legality.problem import Problem
from engines.plan import MODEL_AXES, Plan, Precision
from profiles.machine.cluster import ClusterProfile
from profiles.model.profile import ModelProfile


def by_hand(plan: Plan, model: ModelProfile, cluster: ClusterProfile) -> Iterator[Problem]:
    """Its parts stay where they are: processes may hold replicas of it, and nothing else."""
    if len(model.devices) < 2:
        return
    where = f"the parts of {model.name} were put on {' and '.join(model.devices)} by hand"
    unsplit = "build it on one device without `to(...)`: then it is split for you"
    degrees = plan.said(*MODEL_AXES)
    if plan.data_parallel.is_sharded:
        degrees = f"{degrees} data_parallel={plan.data_parallel}".lstrip()
    if degrees:
        yield Problem(
            rule="by-hand-split-again",
            what=f"{where}; {degrees} would split it again",
            hint=f"replicate it (dp_replicate), or {unsplit}",
        )
    if not plan.updates_in_step:
        yield Problem(
            rule="by-hand-updates",
            what=f"{where}; {plan.said('updates', 'servers')} exchange what one device holds",
            hint=f"set updates=synchronous and servers=0, or {unsplit}",
        )
    kinds = sorted({device.partition(":")[0] for device in model.devices})
    if len(kinds) > 1 and (plan.is_replicated or plan.precision.dtype != model.dtype):
        # DistributedDataParallel and autocast know one type of device.
        why = f"dp_replicate={plan.dp_replicate}" if plan.is_replicated else "autocast"
        yield Problem(
            rule="by-hand-device-types",
            what=f"{where}; {why} wants one type of device, these are {' and '.join(kinds)}",
            hint="put all parts on devices of one type"
            + ("" if plan.precision is Precision.FP32 else ", or set precision=fp32"),
        )
