"""Gradient communication of DDP: the backend's all-reduce, or what is predicted faster.

Everything else of a plan stays as it is. Rounded or compressed gradients change the optimisation:
they are taken only with `Policy.allow_lossy`, and offered without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from advisor.cost import CostModel
from advisor.inputs.policy import Objective, Policy
from advisor.search.ranking import Candidate, first_of_fastest
from engines.legality import problems
from engines.plan import Aggregation, Compression, PartialPlan, Plan
from profiles.units import format_seconds

# Default rank of PowerSGD: it trained a language model as well as full gradients did (Vogels et
# al. 2019, table 7: an LSTM on WikiText-2; image classifiers took 2).
POWERSGD_RANK = 4
_SETTINGS = ("aggregation", "compression", "compression_rank")
# All others put at least as much on the slowest link as the backend's ring. Some save latencies,
# which are shorter than the host takes to launch each message.
_LOSSLESS = ({"aggregation": Aggregation.HIERARCHICAL},)
# In order of increasing loss.
_LOSSY = (
    {"compression": Compression.BF16},
    {"compression": Compression.BF16, "aggregation": Aggregation.HIERARCHICAL},
    {"compression": Compression.POWERSGD, "compression_rank": POWERSGD_RANK},
)


def select(
    winner: Candidate,
    replicas: Candidate | None,
    costs: CostModel,
    policy: Policy,
    partial: PartialPlan,
) -> tuple[Candidate, Candidate | None]:
    """Return the plan to take, and a faster lossy one to offer if the policy does not allow it.

    The plan is `winner`, or `replicas` with other communication if that is faster beyond the
    margin.

    Args:
        replicas: the fastest DDP plan that may be taken, if there is one.
    """
    if replicas is None or policy.objective is Objective.MEMORY or partial.fixes(*_SETTINGS):
        return winner, None
    if replicas.estimate.time.exposed_s <= policy.simplicity_margin * replicas.estimate.step_s:
        return winner, None  # nothing to gain
    exact, lossy = (_plans(changes, replicas.plan, costs) for changes in (_LOSSLESS, _LOSSY))
    best = first_of_fastest(exact, winner, costs, policy) or winner
    faster = first_of_fastest(lossy, best, costs, policy)
    return (faster, None) if faster and policy.allow_lossy else (best, faster)


def _plans(variants: Iterable[Mapping[str, Any]], plan: Plan, costs: CostModel) -> Iterator[Plan]:
    """Yield the legal variants of `plan`."""
    for changes in variants:
        variant = plan.model_copy(update=dict(changes))
        if not problems(variant, costs.facts.model, costs.facts.cluster):
            yield variant


def is_usual(plan: Plan) -> bool:
    """True if the backend reduces gradients uncompressed."""
    return plan.aggregation is Aggregation.BACKEND and plan.compression is Compression.NONE


def settings(plan: Plan) -> str:
    """Format the plan's settings of gradient communication; empty for the usual ones.

    >>> settings(Plan.parse("dp_replicate=4 aggregation=ring"))
    'aggregation=ring'
    """
    return plan.said(*_SETTINGS)


def reason(winner: Candidate, costs: CostModel) -> str:
    """Describe the gain and the risk of the winner's gradient communication."""
    plan = winner.plan
    usual = {"aggregation": Aggregation.BACKEND, "compression": Compression.NONE}
    plain = costs.estimate(plan.model_copy(update={**usual, "compression_rank": 1}))
    before, after = plain.time.exposed_s, winner.estimate.time.exposed_s
    return (
        f"Gradients are reduced with {settings(plan)}: {format_seconds(after)} of a step is exposed"
        f" communication, {format_seconds(before)} with the backend's all-reduce; {risk(plan)}"
    )


def risk(plan: Plan) -> str:
    """Describe the effect of the plan's communication on the gradients."""
    match plan.compression:
        case Compression.NONE:
            return "no precision is lost"
        case Compression.BF16:
            return (
                "each rank's part and every sum is rounded by up to 2^-8 of its value, which"
                " changes the training"
            )
        case Compression.POWERSGD:
            return (
                f"matrices are sent as factors of rank {plan.compression_rank} and the error is"
                " added to later gradients, which changes the training"
            )
