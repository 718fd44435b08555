"""The legal plans of a case that are run: all of them, or the telling ones and a seeded sample."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence

from advisor.cost import CostModel
from advisor.decide.decide import Choice
from advisor.decide.decision import Decision
from advisor.decide.tree import Family, TreeTrace, belongs
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Policy
from advisor.search.cache import SearchCache
from advisor.search.legal import Styles, expert_degrees, space_of
from advisor.search.ranking import Candidate, fastest_first
from advisor.search.stages import StageSearch
from engines.plan import (
    DataParallel,
    Offload,
    OffloadTo,
    PartialPlan,
    Plan,
    Recompute,
    Schedule,
)

MOST = 40
RUNNERS_UP = 8
"""Of our ranking, besides the best of each kind."""
NEAR_MISSES = 3
"""Plans faster than the chosen one that are said not to fit, by so much at most:"""
NEAR = 1.2
HOPELESS = 5.0
"""Plans that are predicted to take so many times the chosen one's step are not in the sample: one
of them takes the time of ten others."""


def plans_of(
    decision: Decision, choice: Choice, *, styles: Styles, seed: int, most: int = MOST
) -> tuple[list[Plan], int]:
    """Plans to run, the chosen one first, and the number of legal ones.

    Always among them: the chosen plan, the best of each family in the documents' order, the best of
    every other kind, what one writes by hand, the runners-up of our ranking, and near misses. The
    others are a sample, so that a plan which nobody thinks of has its chance.
    """
    facts, weighed = decision.facts, choice.weighed
    legal = Legal(facts, styles, offload=decision.plan.offload, to=decision.plan.offload_to)
    ranked = sorted((c for c in weighed if c.fits), key=fastest_first)
    always = [
        decision.plan,
        *(c.plan for c in of_families(ranked, decision.trace).values()),
        *by_hand(legal),
        *(other.plan for other in decision.alternatives),
        *(c.plan for c in ranked[:RUNNERS_UP]),
        *near_misses(weighed, decision),
    ]
    costs, limit_s = CostModel(facts), HOPELESS * decision.estimate.step_s

    def is_hopeful(plan: Plan) -> bool:
        return costs.estimate(plan).step_s <= limit_s

    return sampled(
        filter(is_hopeful, always), len(legal), legal.plan, most=most, seed=seed, wanted=is_hopeful
    ), len(legal)


def sampled(
    always: Iterable[Plan],
    count: int,
    plan: Callable[[int], Plan],
    *,
    most: int,
    seed: int,
    wanted: Callable[[Plan], bool] = lambda plan: True,
) -> list[Plan]:
    """`always`, each once, then `wanted` ones of a seeded order of `count`, until there are `most`.

    What is always taken is never cut, even where it is more than `most`.
    """
    plans = dict.fromkeys(always)
    for index in random.Random(seed).sample(range(count), count):
        if len(plans) >= most:
            break
        other = plan(index)
        if other not in plans and wanted(other):
            plans[other] = None
    return list(plans)


def of_families(ranked: Sequence[Candidate], trace: TreeTrace) -> dict[Family, Candidate]:
    """The first of `ranked` in each family of the leaf, in the documents' order."""
    reach = trace.devices_per_node
    best: dict[Family, Candidate] = {}
    for family in map(Family, trace.families):
        own = (c for c in ranked if belongs(c.plan, family, devices_per_node=reach))
        first = next(own, None)
        if first is not None:
            best[family] = first
    return best


def near_misses(weighed: Sequence[Candidate], decision: Decision) -> list[Plan]:
    """Plans that are faster than the chosen one, and a little too large as predicted."""
    usable = decision.policy.usable_bytes(decision.facts.cluster.device)
    missed = [
        c
        for c in weighed
        if not c.fits
        and usable < c.estimate.peak_high_bytes <= NEAR * usable
        and c.estimate.step_s < decision.estimate.step_s
    ]
    return [c.plan for c in sorted(missed, key=fastest_first)[:NEAR_MISSES]]


class Legal:
    """All legal plans of some facts, by number; each is made when it is asked for."""

    def __init__(self, facts: Facts, styles: Styles, *, offload: Offload, to: OffloadTo) -> None:
        self.facts = facts
        cache, partial = SearchCache(CostModel(facts)), PartialPlan()
        if offload is not Offload.NONE:
            partial = partial.fixing(offload_to=to)
        partials = [
            partial.fixing(ep=ep) if ep > 1 else partial for ep in expert_degrees(facts, partial)
        ]
        self._spaces = [
            (
                space_of(facts, each, styles=styles, offload=offload),
                StageSearch(cache, each, Policy()),
            )
            for each in partials
        ]

    def __len__(self) -> int:
        return sum(len(space) for space, _ in self._spaces)

    def plan(self, index: int) -> Plan:
        for space, stages in self._spaces:
            if index < len(space):
                return stages.plan(space, index)
            index -= len(space)
        raise IndexError(index)

    def first(self, fits: Callable[[Plan], bool]) -> Plan | None:
        """The first whose settings, without stages, are as wanted."""
        for space, stages in self._spaces:
            for index in range(len(space)):
                if fits(space.plan(index)):
                    return stages.plan(space, index)
        return None


def by_hand(legal: Legal) -> Iterator[Plan]:
    """Plans that are written without an advisor: one axis, no recompute, the largest microbatch."""
    ranks = legal.facts.cluster.world_size
    kinds = (
        DataParallel.NONE,
        DataParallel.REPLICATE,
        DataParallel.ZERO1,
        DataParallel.ZERO2,
        DataParallel.FULL_SHARD,
    )

    def is_plain(plan: Plan) -> bool:
        return plan.recompute is Recompute.NONE and plan.accumulation == 1

    for kind in kinds:
        plain = legal.first(
            lambda plan, kind=kind: (  # type: ignore[misc]
                is_plain(plan)
                and plan.data_parallel is kind
                and plan.data_degree == ranks
                and plan.microbatches == 1
            )
        )
        if plain is not None:
            yield plain
    if ranks == 1:
        return
    split = legal.first(lambda plan: is_plain(plan) and plan.tp == ranks and plan.microbatches == 1)
    staged = legal.first(
        lambda plan: (
            is_plain(plan)
            and plan.pp == ranks
            and plan.schedule is Schedule.ONE_F_ONE_B
            and plan.microbatches == ranks
        )
    )
    yield from (plan for plan in (split, staged) if plan is not None)
