"""Asynchronous and periodic updates: considered where links between nodes are slow or step times
vary between ranks, and taken only if the user allows it.

Everything else stays as in the fastest DDP plan. Updates that miss other replicas' gradients change
the optimisation: such plans need `Policy.allow_stale`, and are only offered without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import pi, sin
from typing import Any

from advisor.cost import CostModel
from advisor.cost.estimates.updates import Served
from advisor.decide.tree import TreeTrace
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Objective, Policy
from advisor.search.ranking import Candidate, first_of_fastest
from engines.legality import problems
from engines.plan import PartialPlan, Plan, Updates
from profiles.units import format_gib, format_seconds

# Steps between synchronisations to try. Local SGD trained image classifiers as well as large
# batches did up to 16 (Lin et al. 2020, arXiv:1808.07217); DiLoCo language models at 500, and 100
# is among the periods of its ablation (Douillard et al. 2023, arXiv:2311.08105).
LOCAL_PERIODS = (4, 16)
DILOCO_PERIODS = (100, 500)
_SETTINGS = ("updates", "sync_every", "servers", "backup_workers", "max_staleness")
_SLOW = ("replicate-across-nodes", "everything")  # leaves for slow links between nodes


def select(
    winner: Candidate,
    replicas: Candidate | None,
    costs: CostModel,
    policy: Policy,
    trace: TreeTrace,
    partial: PartialPlan,
) -> tuple[Candidate, Candidate | None]:
    """Return the plan to take, and a faster one to offer if the policy does not allow it.

    The plan is `winner`, or `replicas` with other updates if that is faster beyond the margin.

    Args:
        replicas: the fastest DDP plan that may be taken, if there is one.
    """
    if replicas is None or policy.objective is Objective.MEMORY or partial.fixes(*_SETTINGS):
        return winner, None
    workload = costs.facts.workload
    is_uneven = workload.imbalance > 0 or workload.straggling > 0
    if trace.leaf not in _SLOW and not is_uneven:
        return winner, None
    best = first_of_fastest(_plans(replicas.plan, costs.facts), winner, costs, policy)
    return (best, None) if best and policy.allow_stale else (winner, best)


def _plans(plan: Plan, facts: Facts) -> Iterator[Plan]:
    """Yield the legal variants of `plan`, those closest to synchronous updates first."""
    for changes in _variants(facts):
        variant = _with_batch(plan.model_copy(update=dict(changes)), facts)
        if variant is not None and not problems(variant, facts.model, facts.cluster):
            yield variant


def _variants(facts: Facts) -> Iterator[Mapping[str, Any]]:
    cluster = facts.cluster
    world, nodes = cluster.world_size, cluster.num_nodes
    for servers in dict.fromkeys((1, nodes)):
        for backups in (0, 1):
            workers = world - servers - backups
            yield {"dp_replicate": workers, "servers": servers, "backup_workers": backups}
    for every in LOCAL_PERIODS:
        yield {"updates": Updates.LOCAL, "sync_every": every}
    for servers in dict.fromkeys((1, nodes)):
        workers = world - servers
        yield {"updates": Updates.ASYNCHRONOUS, "dp_replicate": workers, "servers": servers}
    for every in DILOCO_PERIODS:
        yield {"updates": Updates.DILOCO, "sync_every": every}


def _with_batch(plan: Plan, facts: Facts) -> Plan | None:
    """Return `plan` with the batch split over its workers; None if it does not divide."""
    batch = facts.workload.global_batch_size
    if plan.dp_replicate < 2 or batch % plan.dp_replicate:
        return None
    local, most = batch // plan.dp_replicate, plan.microbatch_size or 1
    size = max(n for n in range(1, min(local, most) + 1) if local % n == 0)
    return plan.model_copy(update={"microbatch_size": size, "accumulation": local // size})


def settings(plan: Plan) -> str:
    """Format the plan's settings of updates; empty for DDP's.

    >>> settings(Plan.parse("dp_replicate=4 updates=local sync_every=8"))
    'updates=local sync_every=8'
    """
    return plan.said(*_SETTINGS)


def risk(plan: Plan) -> str:
    """Describe the effect of the plan's updates on the training."""
    if plan.updates is Updates.LOCAL:
        return (
            f"replicas diverge for {plan.sync_every} steps, which changes the training; image"
            " classifiers lost nothing up to 16 (Lin et al. 2020)"
        )
    if plan.updates is Updates.DILOCO:
        return (
            f"replicas diverge for {plan.sync_every} steps, which changes the training; language"
            " models on 8 workers lost nothing at 500 (Douillard et al. 2023)"
        )
    if plan.updates is Updates.ASYNCHRONOUS:
        delay = plan.dp_replicate - 1
        stable = sin(pi / (2 * (2 * delay + 1)))
        return (
            f"gradients are about {delay} updates old, which changes the training; on a quadratic"
            f" the largest stable learning rate is {stable:.2g} of that with fresh gradients"
        )
    if plan.backup_workers:
        return (
            f"the last {plan.backup_workers} of {plan.dp_replicate + plan.backup_workers} gradients"
            " of a step are dropped: samples that are slow to compute count less"
        )
    return "updates are the same as DDP's"


def reason(winner: Candidate, costs: CostModel) -> Iterator[str]:
    """Yield the gain and the risk of asynchronous or periodic updates."""
    plan, cluster = winner.plan, costs.facts.cluster
    if plan.updates_in_step:
        return
    time = winner.estimate.time
    yield (
        f"Ranks update with {settings(plan)}: a step spends {format_seconds(time.exposed_s)} on"
        f" exposed communication and {format_seconds(time.straggling_s)} waiting for slower ranks;"
        f" {risk(plan)}"
    )
    if plan.servers:
        payload = sum(unit.gradient_bytes for unit in costs.facts.model.units)
        served = Served.of(plan, cluster, payload_bytes=payload)
        yield (
            f"Each server receives {format_gib(served.passed_bytes)} of gradients a step and sends"
            " as much of parameters: a step waits for its link"
        )
