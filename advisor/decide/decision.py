"""Decision: the chosen plan with the reasons for it and against others, as saved and shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from pydantic import AliasChoices, Field

from advisor.cost import CostModel, Estimate
from advisor.decide.comparison import PlanVerdict
from advisor.decide.decide import decide
from advisor.decide.sensitivity import Sensitivity, flip
from advisor.decide.tree import TreeTrace
from advisor.inputs.changed_facts import Lever
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Policy
from advisor.search.cache import SearchCache
from advisor.search.ranking import Candidate
from engines.plan import PartialPlan, Plan
from profiles.record import Document, Record

if TYPE_CHECKING:
    from rich.console import RenderableType

    from advisor.whatif.pareto import ParetoPoint
    from advisor.whatif.why_not import WhyNot


class Alternative(Record):
    """Another plan and the reason against it; no step time if it does not fit."""

    title: str
    plan: Plan
    verdict: PlanVerdict
    step_s: float | None
    peak_bytes: float
    peak_high_bytes: float
    because: str


def runner_up(alternatives: Sequence[Alternative]) -> Alternative | None:
    """Return the first alternative that lost by numbers, not because the tree leaves it out."""
    lost = (PlanVerdict.TIE, PlanVerdict.SLOWER, PlanVerdict.LARGER)
    return next((other for other in alternatives if other.verdict in lost), None)


class Decision(Document):
    """Decision for some facts under a policy.

    Attributes:
        plan, estimate: the plan taken and its predicted cost.
        facts, policy, partial: the inputs of the decision.
        reasons: sentences with their numbers, in the order of the argument.
        trace: the path through the decision tree.
        fastest_s: step time of the fastest plan considered: plans within the policy's margin of it
            tie. None in files of earlier releases.
        alternatives: the best plan of other kinds, each with the reason against it.
        weighed: number of plans weighed, most by lower bounds if there are many; `estimated` of
            them exactly. `rejected` counts those left out, by rule.
        dissent: a plan outside the tree's leaf that is faster by more than a tie.
        offers: faster plans that change the training, with their predicted gain.
        suggestions: changes of the inputs that would pay, in decisions that were asked for them
            (`advisor.whatif.suggestions`).
        flipped: result of `flip`, in decisions that save it (`with_flip`).
    """

    plan: Plan
    estimate: Estimate
    facts: Facts
    policy: Policy
    # `pins` in files of earlier releases.
    partial: PartialPlan = Field(
        default=PartialPlan(), validation_alias=AliasChoices("partial", "pins")
    )
    reasons: tuple[str, ...]
    trace: TreeTrace
    fastest_s: float | None = None
    alternatives: tuple[Alternative, ...] = ()
    weighed: int
    estimated: int | None = None
    rejected: dict[str, int] = Field(default_factory=dict)
    dissent: str | None = None
    offers: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()
    flipped: Sensitivity | None = None

    def flip(self, *levers: Lever) -> Sensitivity:
        """Find the smallest change of links, memory, batch or sequence that changes the answer.

        It takes dozens of decisions. `levers` restricts it to some facts, each followed to its own
        crossover.
        """
        if self.flipped is not None and not levers:
            return self.flipped

        cache = SearchCache(CostModel(self.facts))

        def answer(facts: Facts) -> Candidate | None:
            choice = decide(
                facts,
                policy=self.policy,
                partial=self.partial,
                nearest=False,
                cache=cache.for_facts(facts),
            )
            return choice.winner

        if not levers:
            return flip(self.facts, answer)
        each = [flip(self.facts, answer, levers=[lever]) for lever in levers]
        return Sensitivity(
            turns=tuple(crossover for one in each for crossover in one.turns),
            steady=tuple(insensitive for one in each for insensitive in one.steady),
        )

    def with_flip(self) -> Self:
        """Return this decision with the result of `flip`, to be saved with it."""
        return self.model_copy(update={"flipped": self.flip()})

    def why_not(self, settings: str) -> WhyNot:
        """Weigh `settings` ("tp=4", "zero=3 recompute=full") against the plan.

        Raises:
            UnknownNameError, PlanError: not settings of a plan.
        """
        from advisor.whatif.why_not import why_not

        return why_not(self, settings)

    def pareto(
        self, *, devices: Sequence[int] = (), price_per_device_hour: float | None = None
    ) -> tuple[ParetoPoint, ...]:
        """Return the plans that no other beats in step time, memory and device-seconds:
        `advisor.whatif.pareto`.

        Args:
            devices: smaller numbers of devices to consider as well.
            price_per_device_hour: for `ParetoPoint.money`, in any currency.
        """
        from advisor.whatif.pareto import front_of

        return front_of(
            self.facts,
            policy=self.policy,
            partial=self.partial,
            devices=devices,
            price_per_device_hour=price_per_device_hour,
        )

    @property
    def chosen(self) -> Candidate:
        """The plan with its estimate."""
        return Candidate(self.plan, self.estimate)

    @property
    def fastest_step_s(self) -> float:
        """Step time of the fastest plan considered."""
        return self.estimate.step_s if self.fastest_s is None else self.fastest_s

    def __str__(self) -> str:
        """The report as plain text, 80 columns."""
        from advisor.report.terminal import text
        from advisor.report.view import view_of

        return text(view_of(self))

    def __rich__(self) -> RenderableType:
        from advisor.report.terminal import Report
        from advisor.report.view import view_of

        return Report(view_of(self))

    def _repr_html_(self) -> str:
        from advisor.report.html import fragment
        from advisor.report.view import view_of

        return fragment(view_of(self))
