"""Plans after a shortage of memory: the next one that fits, by what the shortage has shown.

First those that compute the same: smaller microbatches and more accumulation, then more recompute.
A training follows them as it runs. If none of them fits, another plan is chosen, for a new start.
"""

from __future__ import annotations

from collections.abc import Iterator

from advisor.cost import estimate
from advisor.decide.choose import choose
from advisor.decide.decision import Decision
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Policy
from advisor.learning.shortages import FailedPlan, below, failed_plan, keep_failed
from advisor.search.ranking import fits_device
from engines.legality import problems
from engines.parallel.recovery import NextPlan
from engines.plan import Plan, Recompute
from engines.runtime.shortage import Shortage
from profiles.errors import AdvisorError
from profiles.units import format_gib


class NextPlans:
    """The answers to the shortages of one training.

    Args:
        learns: keep them for later decisions on this machine.
    """

    def __init__(self, decision: Decision, *, learns: bool) -> None:
        self._decision = decision
        self._learns = learns
        self._failed: list[FailedPlan] = []

    def __call__(self, plan: Plan, shortage: Shortage) -> NextPlan:
        facts, policy = self._decision.facts, self._decision.policy
        failed = failed_plan(plan, facts, needed_bytes=shortage.needed_bytes)
        self._failed.append(failed)
        if self._learns:
            keep_failed(failed)
        facts = below(facts, self._failed)
        chosen = next(
            (one for one in lighter(plan, facts) if _fits(one, facts, policy)),
            None,
        )
        if chosen is None:
            try:
                chosen = choose(facts, policy=policy, partial=self._decision.partial).plan
            except AdvisorError as error:
                return NextPlan(plan=None, because=error.what)
        before, after = estimate(plan, self._decision.facts), estimate(chosen, facts)
        usable = policy.usable_bytes(facts.cluster.device)
        because = (
            f"predicted {format_gib(before.peak_bytes)}, needed at least"
            f" {format_gib(shortage.needed_bytes)}; the next plan is predicted"
            f" {format_gib(after.peak_bytes)} (up to {format_gib(after.peak_high_bytes)}) of"
            f" {format_gib(usable)} usable"
        )
        return NextPlan(plan=chosen, because=because)


def lighter(plan: Plan, facts: Facts) -> Iterator[Plan]:
    """Yield plans whose step computes the same from the same parameters with less memory.

    Batch norms normalise each microbatch: for models that have some, more recompute comes first.
    """
    kinds = tuple(Recompute)[tuple(Recompute).index(plan.recompute) :]
    if plan.recompute_blocks is None:
        kinds = kinds[1:]
    orders = [(plan.recomputing(kind), True) for kind in kinds]
    orders.insert(len(orders) if facts.model.batch_norms else 0, (plan, False))
    for base, is_whole in orders:
        for size in _sizes(plan):
            if size == plan.microbatch_size and not is_whole:
                continue
            one = base.model_copy(update=_cut(plan, size))
            if not problems(one, facts.model, facts.cluster):
                yield one


def _sizes(plan: Plan) -> list[int]:
    """Sizes of a microbatch that divide the present one, from the largest."""
    rows = plan.microbatch_size or 1
    return [size for size in range(rows, 0, -1) if rows % size == 0]


def _cut(plan: Plan, size: int) -> dict[str, int]:
    if plan.microbatch_size is None:
        return {}
    accumulation = plan.accumulation * plan.microbatch_size // size
    return {"microbatch_size": size, "accumulation": accumulation}


def _fits(plan: Plan, facts: Facts, policy: Policy) -> bool:
    return fits_device(plan, estimate(plan, facts), facts, policy) is None
