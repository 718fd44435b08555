"""Preflight of a job: risks of its machines are logged before its first step."""

from __future__ import annotations

import logging
import os

from advisor.decide.decision import Decision
from advisor.report.basis import too_large_to_load
from engines.plan import AXES, Plan
from engines.runtime.preflight import job_risks
from profiles.machine.cluster import ClusterProfile

log = logging.getLogger(__name__)


def warn_of_risks(decision: Decision, *, ranks: int, is_loaded: bool = False) -> None:
    """Log the risks of this node, by its first rank; `is_loaded`: without those of loading."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    for risk in risks_of(decision, ranks=ranks, is_loaded=is_loaded):
        log.warning("%s", risk)


def risks_of(decision: Decision, *, ranks: int, is_loaded: bool = False) -> list[str]:
    """The risks of this node for a job of `ranks` under the plan of `decision`, in words."""
    risks = machine_risks(decision.plan, decision.facts.cluster, ranks=ranks)
    return [*risks, *(() if is_loaded else too_large_to_load(decision))]


def machine_risks(plan: Plan, cluster: ClusterProfile, *, ranks: int) -> list[str]:
    """Those of them that do not depend on the model."""
    is_gpu = cluster.device.kind != "cpu"
    axes = sum(getattr(plan, axis) > 1 for axis in AXES)
    is_direct = cluster.host_bridge is None or cluster.host_bridge.peer_to_peer
    over_pcie = cluster.intra is not None and cluster.intra.name.startswith("pcie")
    risks = job_risks(
        ranks=ranks,
        groups=1 + axes,
        devices=cluster.devices_per_node if is_gpu else 0,
        over_pcie=over_pcie and is_direct,
    )
    return [*map(str, risks)]
