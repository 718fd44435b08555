"""Ranks that update apart from each other: weighed where links between nodes are slow or ranks
scatter, and taken by the user's word alone.

Everything else of a plan stays as that of the fastest DDP plan. What replicas do not know of each
other changes the optimisation, so such plans need `Policy.allow_stale`, and are offered otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import pi, sin
from typing import Any

from advisor.cost import CostModel
from advisor.cost.updates import Served
from advisor.decide.tree import TreeTrace
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Objective, Policy
from advisor.search.ranking import Candidate, first_of_fastest
from engines.legality import problems
from engines.plan import PartialPlan, Plan, Updates
from profiles.units import format_gib, format_seconds

# Steps between two meetings that are tried. Local SGD trained image classifiers as well as large
# batches did up to 16 (Lin et al. 2020, arXiv:1808.07217); DiLoCo language models at 500, and 100
# is among the periods of its ablation (Douillard et al. 2023, arXiv:2311.08105).
LOCAL_PERIODS = (4, 16)
DILOCO_PERIODS = (100, 500)
_SETTINGS = ("updates", "sync_every", "servers", "backup_workers", "max_staleness")
_SLOW = ("replicate-across-nodes", "everything")  # leaves behind slow links between nodes


@dataclass(frozen=True, slots=True)
class Apart:
    """`winner` after such plans were looked at; `offered` would be faster, and was not allowed."""

    winner: Candidate
    offered: Candidate | None = None


def apart(
    winner: Candidate,
    replicas: Candidate | None,
    costs: CostModel,
    policy: Policy,
    trace: TreeTrace,
    partial: PartialPlan,
) -> Apart:
    """The winner, or `replicas` updating apart where that is faster beyond the margin.

    Args:
        replicas: the fastest DDP plan that may be taken, if there is one.
    """
    if replicas is None or policy.objective is Objective.MEMORY or partial.fixes(*_SETTINGS):
        return Apart(winner)
    workload = costs.facts.workload
    is_uneven = workload.imbalance > 0 or workload.straggling > 0
    if trace.leaf not in _SLOW and not is_uneven:
        return Apart(winner)
    best = first_of_fastest(_plans(replicas.plan, costs.facts), winner, costs, policy)
    if best is None:
        return Apart(winner)
    return Apart(best) if policy.allow_stale else Apart(winner, best)


def _plans(plan: Plan, facts: Facts) -> Iterator[Plan]:
    """Legal ones, those first that go apart least."""
    model, cluster = facts.model, facts.cluster
    for way in _ways(facts):
        wanted = _with_batch(plan.model_copy(update=dict(way)), facts)
        if wanted is not None and not problems(wanted, model, cluster):
            yield wanted


def _ways(facts: Facts) -> Iterator[Mapping[str, Any]]:
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
    """`plan` with the batch cut for as many workers as it has; None where it does not divide."""
    batch = facts.workload.global_batch_size
    if plan.dp_replicate < 2 or batch % plan.dp_replicate:
        return None
    local, most = batch // plan.dp_replicate, plan.microbatch_size or 1
    size = max(n for n in range(1, min(local, most) + 1) if local % n == 0)
    return plan.model_copy(update={"microbatch_size": size, "accumulation": local // size})


def settings(plan: Plan) -> str:
    """What is said of it in a plan.

    >>> settings(Plan.parse("dp_replicate=4 updates=local sync_every=8"))
    'updates=local sync_every=8'
    """
    return plan.said(*_SETTINGS)


def risk(plan: Plan) -> str:
    """What it does to the training, in words."""
    if plan.updates is Updates.LOCAL:
        return (
            f"replicas go apart for {plan.sync_every} steps, so the training is another; image"
            " classifiers lost nothing up to 16 (Lin et al. 2020)"
        )
    if plan.updates is Updates.DILOCO:
        return (
            f"replicas go apart for {plan.sync_every} steps, so the training is another; language"
            " models on 8 workers lost nothing at 500 (Douillard et al. 2023)"
        )
    if plan.updates is Updates.ASYNCHRONOUS:
        delay = plan.dp_replicate - 1
        stable = sin(pi / (2 * (2 * delay + 1)))
        return (
            f"a gradient is some {delay} updates old, so the training is another; on a quadratic"
            f" the largest stable learning rate is {stable:.2g} of that of fresh gradients"
        )
    if plan.backup_workers:
        return (
            f"the last {plan.backup_workers} of {plan.dp_replicate + plan.backup_workers} gradients"
            " of a step are dropped: what is slow to compute counts less"
        )
    return "updates are those of DDP"


def reason(winner: Candidate, costs: CostModel) -> Iterator[str]:
    """What updating apart gains, and what it risks."""
    plan, cluster = winner.plan, costs.facts.cluster
    if plan.updates_in_step:
        return
    time = winner.estimate.time
    yield (
        f"Ranks update by {settings(plan)}: {format_seconds(time.exposed_s)} of a step are sent"
        f" and {format_seconds(time.straggling_s)} waited for slower ranks; {risk(plan)}"
    )
    if plan.servers:
        payload = sum(unit.gradient_bytes for unit in costs.facts.model.units)
        served = Served.of(plan, cluster, payload_bytes=payload)
        yield (
            f"Each server takes {format_gib(served.passed_bytes)} of gradients a step and gives as"
            " much of parameters: its link is what a step waits for"
        )


def offer(offered: Candidate, winner: Candidate) -> str:
    """What would be faster if ranks might update apart."""
    times = winner.estimate.step_s / offered.estimate.step_s
    return (
        f"{settings(offered.plan)} is predicted {times:.1f} times as fast"
        f" ({format_seconds(offered.estimate.step_s)} a step); {risk(offered.plan)}: only"
        " `--allow-stale` (`allow_stale=True`) takes it"
    )
