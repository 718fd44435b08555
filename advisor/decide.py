"""decide: which of the legal plans is taken. `advisor.choose` adds the argument for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from advisor.candidates import Pins, legal_plans, refuse
from advisor.cost import CostModel
from advisor.facts import Facts
from advisor.policy import Objective, Policy
from advisor.rules import Candidate, preferred, weigh
from advisor.tree import Trace, in_leaf
from advisor.walk import walk
from engines.plan import Offload, Plan

_DEFAULT = Policy()
_NO_PINS: Pins = {}


@dataclass(frozen=True, slots=True)
class Choice:
    """What was weighed, and what was taken of it.

    `winner` is None where nothing fits. `pool` are the plans that fit and that the winner was taken
    from, `fitting` all that fit.
    """

    winner: Candidate | None
    pool: Sequence[Candidate]
    fitting: Sequence[Candidate]
    weighed: Sequence[Candidate]
    trace: Trace

    @property
    def rejected(self) -> dict[str, int]:
        """How many were left out, by rule."""
        counts = Counter(c.finding.rule for c in self.weighed if c.finding)
        return dict(sorted(counts.items()))


def decide(facts: Facts, *, policy: Policy = _DEFAULT, pins: Pins = _NO_PINS) -> Choice:
    """The plan for these facts: deterministic, nothing else is looked at.

    Every legal plan is weighed. The tree's leaf says which families come first; the fastest plan of
    them that fits is taken, the simpler one on a tie. States go to the host only where nothing else
    fits.

    Raises:
        PlanError: `pins` allow no legal plan.
    """
    costs = CostModel(facts)
    plans = legal_plans(facts, pins)
    if not plans:
        raise refuse(facts, pins)
    weighed = weigh(plans, costs, policy)
    if not any(c.fits for c in weighed) and "offload" not in pins:
        weighed += weigh(_offloaded(facts, pins), costs, policy)
    fitting = [c for c in weighed if c.fits]
    trace = walk(costs, policy)
    of_leaf = [c for c in fitting if in_leaf(c.plan, trace)]
    follows = policy.objective is Objective.TREE and bool(of_leaf)
    pool = of_leaf if follows else fitting
    winner = preferred(pool, policy) if pool else None
    return Choice(winner, pool, fitting, weighed, trace)


def _offloaded(facts: Facts, pins: Pins) -> list[Plan]:
    """Plans with states on the host; a CPU rank's device memory is the host's already."""
    if facts.cluster.device.kind == "cpu":
        return []
    return legal_plans(facts, pins, offload=Offload.STATES)
