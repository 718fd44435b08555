"""Small batches: what they cost in time, and in the accuracy of batch norms.

The other end of `large_batch`. A small share of the batch leaves a device waiting: products are too
thin for its units, launches and exchanges do not shrink with them. And batch norms take their
statistics over fewer samples than they can be estimated from.
"""

from __future__ import annotations

from collections.abc import Iterator

from advisor.cost import estimate
from advisor.decide.decision import Decision
from profiles.errors import AdvisorError

NOISY_STATISTICS = 8
"""Samples of a batch norm's statistics up to which accuracy suffers: ResNet-50 on ImageNet errs in
23.6% with 32 samples a device, 24.8% with 8, 27.3% with 4, 34.7% with 2 (Wu and He 2018,
arXiv:1803.08494, table 2)."""
LARGER = 4
"""Times the batch, to see what the present one wastes."""
WASTEFUL = 1.5
"""Times the samples a second at which that is worth a hint; chosen."""


def small_batch_hints(decision: Decision) -> Iterator[str]:
    """Yield what the smallness of the batch does to the chosen plan."""
    yield from _statistics(decision)
    yield from _waiting(decision)


def _statistics(decision: Decision) -> Iterator[str]:
    plan, norms = decision.plan, decision.facts.model.batch_norms
    if not norms or plan.microbatch_size is None:
        return
    replicas = plan.data_degree
    samples = plan.microbatch_size * (replicas if plan.sync_batch_norm else 1)
    if samples > NOISY_STATISTICS:
        return
    remedy = "a larger batch, or a norm that looks at one sample (group norm)"
    if replicas > 1 and not plan.sync_batch_norm:
        remedy = f"`sync_batch_norm=true` takes the {samples * replicas} of all replicas"
    yield (
        f"`{norms[0]}` takes statistics over {samples} sample{'s' if samples > 1 else ''}:"
        " ResNet-50 erred in 23.6% with 32, 24.8% with 8 and 34.7% with 2 (Wu and He 2018);"
        f" {remedy}"
    )


def _waiting(decision: Decision) -> Iterator[str]:
    plan, facts = decision.plan, decision.facts
    if plan.microbatch_size is None or not plan.updates_in_step:
        return
    batch = facts.workload.global_batch_size
    work = facts.workload.model_copy(update={"global_batch_size": LARGER * batch})
    try:
        larger = estimate(
            plan.model_copy(update={"microbatch_size": LARGER * plan.microbatch_size}),
            facts.model_copy(update={"workload": work}),
        )
    except AdvisorError:
        return
    times = LARGER * decision.estimate.step_s / larger.step_s
    fits = larger.peak_high_bytes <= decision.policy.usable_bytes(facts.cluster.device)
    if times >= WASTEFUL and fits:
        yield (
            f"{plan.microbatch_size} sample{'s' if plan.microbatch_size > 1 else ''} a microbatch"
            f" leave{'s' * (plan.microbatch_size == 1)} devices waiting: global batch"
            f" {LARGER * batch} would train {times:.1f} times as many samples a second"
        )
