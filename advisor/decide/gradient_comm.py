"""How DDP sends its gradients: the backend's all-reduce, unless another way is predicted faster.

Everything else of a plan stays as it is. What rounds or leaves out parts of gradients changes the
optimisation: it is taken with `Policy.allow_lossy` alone, and offered otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from advisor.cost import CostModel
from advisor.inputs.policy import Objective, Policy
from advisor.search.ranking import Candidate, first_of_fastest
from engines.legality import problems
from engines.plan import Aggregation, Compression, PartialPlan, Plan
from profiles.units import format_seconds

# Of PowerSGD, where none is given: what trained a language model as well as whole gradients did
# (Vogels et al. 2019, table 7: an LSTM on WikiText-2; image classifiers took 2).
POWERSGD_RANK = 4
_SETTINGS = ("aggregation", "compression", "compression_rank")
# All others put as much on the slowest link as the backend's ring does, or more. What some spare
# are latencies, and those are less than the host takes to launch each message.
_LOSSLESS = ({"aggregation": Aggregation.HIERARCHICAL},)
# Those that lose less first.
_LOSSY = (
    {"compression": Compression.BF16},
    {"compression": Compression.BF16, "aggregation": Aggregation.HIERARCHICAL},
    {"compression": Compression.POWERSGD, "compression_rank": POWERSGD_RANK},
)


@dataclass(frozen=True, slots=True)
class Sending:
    """`winner` with the way that its gradients go; `offered` would be faster, and is lossy."""

    winner: Candidate
    offered: Candidate | None = None


def sending(
    winner: Candidate,
    replicas: Candidate | None,
    costs: CostModel,
    policy: Policy,
    partial: PartialPlan,
) -> Sending:
    """The winner, or `replicas` in another way of sending where that is faster beyond the margin.

    Args:
        replicas: the fastest DDP plan that may be taken, if there is one.
    """
    if replicas is None or policy.objective is Objective.MEMORY or partial.fixes(*_SETTINGS):
        return Sending(winner)
    if replicas.estimate.time.exposed_s <= policy.simplicity_margin * replicas.estimate.step_s:
        return Sending(winner)  # there is nothing to gain
    exact, lossy = (_legal(ways, replicas.plan, costs) for ways in (_LOSSLESS, _LOSSY))
    best = first_of_fastest(exact, winner, costs, policy) or winner
    offered = first_of_fastest(lossy, best, costs, policy)
    if offered is None:
        return Sending(best)
    return Sending(offered) if policy.allow_lossy else Sending(best, offered)


def _legal(ways: Iterable[Mapping[str, Any]], plan: Plan, costs: CostModel) -> Iterator[Plan]:
    for way in ways:
        found = plan.model_copy(update=dict(way))
        if not problems(found, costs.facts.model, costs.facts.cluster):
            yield found


def is_usual(plan: Plan) -> bool:
    """Whether gradients go whole, by the backend."""
    return plan.aggregation is Aggregation.BACKEND and plan.compression is Compression.NONE


def settings(plan: Plan) -> str:
    """What is said of it in a plan.

    >>> settings(Plan.parse("dp_replicate=4 aggregation=ring"))
    'aggregation=ring'
    """
    return plan.said(*_SETTINGS)


def reason(winner: Candidate, costs: CostModel) -> str:
    """What the winner's way of sending gains, and what it does to the gradients."""
    plan = winner.plan
    usual = {"aggregation": Aggregation.BACKEND, "compression": Compression.NONE}
    plain = costs.estimate(plan.model_copy(update={**usual, "compression_rank": 1}))
    before, after = plain.time.exposed_s, winner.estimate.time.exposed_s
    return (
        f"Gradients go by {settings(plan)}: {format_seconds(after)} a step that nothing hides, by"
        f" the backend's all-reduce {format_seconds(before)}; {risk(plan)}"
    )


def risk(plan: Plan) -> str:
    """What it does to the gradients, in words."""
    match plan.compression:
        case Compression.NONE:
            return "nothing of them is lost"
        case Compression.BF16:
            return "each rank's part and every sum is rounded by up to 2^-8 of its value"
        case Compression.POWERSGD:
            return (
                f"matrices go as factors of rank {plan.compression_rank}, what these miss goes with"
                " later steps, and the training is another"
            )


def offer(offered: Candidate, winner: Candidate) -> str:
    """What would be faster if gradients might lose something."""
    times = winner.estimate.step_s / offered.estimate.step_s
    return (
        f"{settings(offered.plan)} is predicted {times:.1f} times as fast"
        f" ({format_seconds(offered.estimate.step_s)} a step); it changes the gradients:"
        f" {risk(offered.plan)}; only `--allow-lossy` (`allow_lossy=True`) takes it"
    )
