"""Outcomes of programs under plans, and their counts."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from pathlib import Path

from pydantic import NonNegativeInt

from profiles.record import Document, Record

REPORT = Path(__file__).parents[1] / "validation" / "fuzz_modules.json"


class Outcome(StrEnum):
    """The first two are the only ones that are right."""

    TRAINED = "trained"  # as in one process, within the tolerance
    REFUSED = "refused"  # by one of our errors, before any step
    LATE = "late"  # by one of our errors, in a step
    DIFFERED = "differed"  # ran, with other numbers
    CRASHED = "crashed"
    HUNG = "hung"


ALLOWED = (Outcome.TRAINED, Outcome.REFUSED)


class Case(Record):
    """A program under a plan; `text`: why it was refused, or what went wrong."""

    program: str
    again: str
    plan: str
    outcome: Outcome
    text: str = ""

    @property
    def seed(self) -> int:
        """Of its program, as `again` names it."""
        return int(self.again.split()[1])

    @property
    def cause(self) -> str:
        """`text` without names and numbers, so that equal causes are counted together."""
        words = self.text.splitlines()[-1] if self.text else ""
        quoted = words.split("`")
        return "`".join("_" if n % 2 else part for n, part in enumerate(quoted))[:160]


class PlanCounts(Record):
    """Cases of one plan by outcome, and its refusals by cause, most first."""

    plan: str
    outcomes: dict[str, NonNegativeInt]
    refusals: dict[str, NonNegativeInt]


class FuzzedModules(Document):
    """A run; `wrong` are the cases that neither trained nor were refused."""

    torch: str
    seed: int
    programs: NonNegativeInt
    plans: tuple[PlanCounts, ...]
    wrong: tuple[Case, ...] = ()

    def with_cases(self, cases: list[Case], *, programs: int) -> FuzzedModules:
        """The counts of `programs` with these cases too; one that was wrong and ran again counts as
        it ended now."""
        again = {(case.again, case.plan) for case in cases}
        left = [case for case in self.wrong if (case.again, case.plan) not in again]
        outdated = counts_of([case for case in self.wrong if case not in left])
        return self.model_copy(
            update={
                "programs": programs,
                "plans": added(self.plans, counts_of(cases), less=outdated),
                "wrong": (*left, *(case for case in cases if case.outcome not in ALLOWED)),
            }
        )


def added(
    before: tuple[PlanCounts, ...], more: tuple[PlanCounts, ...], *, less: tuple[PlanCounts, ...]
) -> tuple[PlanCounts, ...]:
    """Counts of both by plan, but for those of `less`."""
    outcomes: dict[str, Counter[str]] = {}
    refusals: dict[str, Counter[str]] = {}
    for counts in (*before, *more):
        outcomes.setdefault(counts.plan, Counter()).update(counts.outcomes)
        refusals.setdefault(counts.plan, Counter()).update(counts.refusals)
    for counts in less:
        outcomes[counts.plan].subtract(counts.outcomes)
    return tuple(
        PlanCounts(
            plan=plan,
            outcomes=dict(sorted((+outcomes[plan]).items())),
            refusals=dict(refusals[plan].most_common()),
        )
        for plan in outcomes
    )


def counts_of(cases: list[Case]) -> tuple[PlanCounts, ...]:
    """By plan, in the order of the cases."""
    by_plan: dict[str, list[Case]] = {}
    for case in cases:
        by_plan.setdefault(case.plan, []).append(case)
    return tuple(
        PlanCounts(
            plan=plan,
            outcomes=dict(sorted(Counter(case.outcome.value for case in each).items())),
            refusals=dict(
                Counter(c.cause for c in each if c.outcome is Outcome.REFUSED).most_common()
            ),
        )
        for plan, each in by_plan.items()
    )
