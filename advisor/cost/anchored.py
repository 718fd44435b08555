"""Corrections of time and memory terms by a measured step; see `advisor.learning.anchor`.

Corrected constants of a cluster are in the cluster profile already. The corrections here belong to
no constant: the update, waiting, activations, and the ranges. Without a measured step nothing
changes.
"""

from __future__ import annotations

from dataclasses import replace

from advisor.cost.communication import exchange
from advisor.cost.compute import unit_times
from advisor.cost.load.loads import Loads
from engines.plan import Plan
from profiles.machine.cluster import Anchored, ClusterProfile
from profiles.workload.optimizers import Upkeep


def loads(counted: Loads, cluster: ClusterProfile) -> Loads:
    """Scale activations and temporaries as measured; exchanged tensors keep their shapes."""
    step = _step(cluster)
    if step is None or step.activations == 1.0:
        return counted
    factor = step.activations
    runs = tuple(
        replace(
            run,
            activation_bytes=factor * run.activation_bytes,
            selective_bytes=factor * run.selective_bytes,
            forward_transient_bytes=factor * run.forward_transient_bytes,
            backward_transient_bytes=factor * run.backward_transient_bytes,
        )
        for run in counted.runs
    )
    return replace(counted, runs=runs)


def update(counted: Upkeep, cluster: ClusterProfile) -> Upkeep:
    """Scale the time of an optimizer's step as measured."""
    step = _step(cluster)
    if step is None or step.update == 1.0:
        return counted
    moved_bytes, flop = step.update * counted.moved_bytes, step.update * counted.flop
    operations = step.update * counted.operations
    return replace(counted, moved_bytes=moved_bytes, flop=flop, operations=operations)


def waiting_s(plan: Plan, cluster: ClusterProfile, *, computing_s: float) -> float:
    """Seconds of a step that ranks wait for each other and for a core, without communication."""
    step = _step(cluster)
    alone = plan.world_size == 1 or not plan.updates_in_step
    return 0.0 if step is None or alone else step.waiting * computing_s


def compute_error(cluster: ClusterProfile, dtype: str) -> float:
    """Half-width of the range of computing time, as a fraction."""
    step = _step(cluster)
    if step is None or step.compute_error is None:
        return unit_times.compute_error(cluster.device, dtype)
    return step.compute_error


def update_error(cluster: ClusterProfile, dtype: str) -> float:
    """Half-width of the range of the optimizer's step, as a fraction. On a processor it may be
    launches tensor by tensor."""
    step = _step(cluster)
    if step is not None and step.update_error is not None:
        return step.update_error
    device = cluster.device
    launching = unit_times.launch_error(device) if device.kind == "cpu" else 0.0
    return max(unit_times.compute_error(device, dtype), launching)


def launch_error(cluster: ClusterProfile) -> float:
    """Half-width of the range of launch time, which is measured with compute."""
    step = _step(cluster)
    if step is None or step.compute_error is None:
        return unit_times.launch_error(cluster.device)
    return step.compute_error


def communication_error(plan: Plan, cluster: ClusterProfile) -> float:
    """Half-width of the range of communication time, as a fraction."""
    step = _step(cluster)
    if step is None or step.communication_error is None:
        return exchange.communication_error(plan, cluster)
    return step.communication_error


def _step(cluster: ClusterProfile) -> Anchored | None:
    return cluster.learned.anchored if cluster.learned else None
