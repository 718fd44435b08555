"""Decision: the plan that was chosen, why, and why not another. A value that is saved and shown."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from pydantic import Field

from advisor.candidates import legal_plans, nearest_settings, why_illegal
from advisor.cost import CostModel, Estimate
from advisor.facts import Facts
from advisor.policy import Objective, Policy
from advisor.rules import Candidate, margin_s, preferred, simplicity, weigh
from advisor.tree import Trace, in_leaf
from engines.plan import DataParallel, Offload, Plan, Recompute, parse_settings
from profiles.record import Document, Record
from profiles.units import format_gib, format_percent, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

PinValue = bool | int | str | tuple[str, ...] | tuple[tuple[str, str], ...]


class Verdict(StrEnum):
    """How another plan stands against the one that was taken."""

    CHOSEN = "chosen"
    NOT_LEGAL = "not legal"
    NO_FIT = "does not fit"
    SLOWER = "slower"
    LARGER = "more memory"
    TIE = "tie"
    OUTSIDE = "outside the tree's families"
    RULED_OUT = "ruled out by the settings that were given"


class Alternative(Record):
    """Another plan, and why it was not taken; no step time where it does not fit."""

    title: str
    plan: Plan
    verdict: Verdict
    step_s: float | None
    peak_bytes: float
    peak_high_bytes: float
    because: str


class WhyNot(Record):
    """The answer to "why not this setting?": the best plan that has it, weighed against the choice.

    `plan` and `estimate` are None where the setting is not legal.
    """

    settings: str
    verdict: Verdict
    because: str
    plan: Plan | None = None
    estimate: Estimate | None = None

    def __str__(self) -> str:
        lines = [f"{self.settings}: {self.verdict}", f"  {self.because}"]
        if self.plan is not None:
            lines.append(f"  best plan with it: {self.plan}")
        return "\n".join(lines)

    def __rich__(self) -> Text:
        from rich.text import Text

        return Text(str(self))


class Decision(Document):
    """What was decided for these facts under this policy.

    Attributes:
        plan, estimate: the plan that was taken and its predicted cost.
        facts, policy, pins: all that it was decided from.
        reasons: sentences with their numbers, in the order of the argument.
        trace: the path through the decision tree.
        alternatives: the best plan of other kinds, each with the reason against it.
        weighed: plans that were estimated; `rejected` counts those left out, by rule.
        dissent: where a plan outside the tree's leaf is faster by more than the range.
    """

    plan: Plan
    estimate: Estimate
    facts: Facts
    policy: Policy
    pins: dict[str, PinValue] = Field(default_factory=dict)
    reasons: tuple[str, ...]
    trace: Trace
    alternatives: tuple[Alternative, ...] = ()
    weighed: int
    rejected: dict[str, int] = Field(default_factory=dict)
    dissent: str | None = None

    def why_not(self, settings: str) -> WhyNot:
        """Weigh `settings` ("tp=4", "zero=3 recompute=full") against the plan.

        Raises:
            UnknownNameError, PlanError: not settings of a plan.
        """
        asked = parse_settings(settings)
        pins = _without_conflicts(self.pins, asked) | asked
        plans = legal_plans(self.facts, pins)
        if not plans:
            found = [problem.what for problem in why_illegal(self.facts, pins)]
            found += nearest_settings(self.facts, pins)
            return WhyNot(settings=settings, verdict=Verdict.NOT_LEGAL, because="; ".join(found))
        best = best_of(weigh(plans, CostModel(self.facts), self.policy), self.policy)
        verdict, because = compare(best, self.chosen, self.policy, self.trace)
        return WhyNot(
            settings=settings,
            verdict=verdict,
            because=because,
            plan=best.plan,
            estimate=best.estimate,
        )

    @property
    def chosen(self) -> Candidate:
        """The plan with its estimate."""
        return Candidate(self.plan, self.estimate)

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


def title(plan: Plan) -> str:
    """A plan's way of spreading, in words.

    >>> title(Plan.parse("dp_replicate=2 dp_shard=8"))
    'HSDP, shard 8 x replicate 2'
    """
    replicate, shard = plan.dp_replicate, plan.dp_shard
    words = {
        DataParallel.NONE: "one device",
        DataParallel.THREADS: f"threads over {replicate}",
        DataParallel.REPLICATE: f"DDP over {replicate}",
        DataParallel.ZERO1: f"ZeRO-1 over {replicate}",
        DataParallel.ZERO2: f"ZeRO-2 over {replicate}",
        DataParallel.FULL_SHARD: f"FSDP over {shard}",
        DataParallel.HYBRID_SHARD: f"HSDP, shard {shard} x replicate {replicate}",
    }[plan.data_parallel]
    return words + (", CPU offload" if plan.offload is Offload.STATES else "")


def cuts(plan: Plan) -> str:
    """How a replica's batch is cut and run, in words."""
    words = f"microbatch {plan.microbatch_size}"
    if plan.forwards > 1:
        words += f" x {plan.forwards} accumulation"
    if plan.recompute is not Recompute.NONE:
        words += f", {plan.recompute} recompute"
    return f"{words}, {plan.precision}"


def best_of(candidates: list[Candidate], policy: Policy) -> Candidate:
    """The preferred plan that fits; where none does, the one that misses by least."""
    fitting = [candidate for candidate in candidates if candidate.fits]
    return preferred(fitting, policy) if fitting else nearest_miss(candidates)


def nearest_miss(candidates: list[Candidate]) -> Candidate:
    """The plan that needs least above what there is."""
    return min(
        candidates,
        key=lambda c: (
            c.finding.missing_bytes if c.finding else 0.0,
            simplicity(c.plan),
            str(c.plan),
        ),
    )


def compare(
    other: Candidate, chosen: Candidate, policy: Policy, trace: Trace
) -> tuple[Verdict, str]:
    """How `other` stands against the choice, with the numbers."""
    if other.plan == chosen.plan:
        return Verdict.CHOSEN, "it is the plan that was taken"
    if other.finding is not None:
        return Verdict.NO_FIT, other.finding.because
    mine, theirs = chosen.estimate, other.estimate
    if policy.objective is Objective.MEMORY:
        more = theirs.peak_high_bytes - mine.peak_high_bytes
        if more < 0:
            return Verdict.RULED_OUT, f"needs {format_gib(-more)} less, but other settings are kept"
        return Verdict.LARGER, f"needs {format_gib(more)} more"
    difference = theirs.step_s - mine.step_s
    percent = format_percent(abs(difference) / mine.step_s)
    tied = abs(difference) <= margin_s(mine, theirs, policy)
    outside = policy.objective is Objective.TREE and not in_leaf(other.plan, trace)
    if tied and simplicity(other.plan) >= simplicity(chosen.plan):
        return Verdict.TIE, f"equally fast ({_signed(difference, percent)}), not simpler"
    if difference < 0:
        if outside:
            return Verdict.OUTSIDE, f"{_signed(difference, percent)}, but outside the tree's leaf"
        if tied:
            return Verdict.TIE, f"{_signed(difference, percent)}, within the range of the estimate"
        return Verdict.RULED_OUT, f"{_signed(difference, percent)}, but other settings are kept"
    if outside and tied:
        return Verdict.OUTSIDE, f"{_signed(difference, percent)}, and outside the tree's leaf"
    return Verdict.SLOWER, f"{_signed(difference, percent)}: {_cause(theirs, mine)}"


_PARTS = {
    "compute_s": "computing",
    "recompute_s": "recompute",
    "optimizer_s": "optimizer",
    "exposed_s": "exposed communication",
    "launch_s": "launching",
}


def _cause(slower: Estimate, faster: Estimate) -> str:
    """The part of the step in which `slower` loses most."""
    loss = {part: getattr(slower.time, part) - getattr(faster.time, part) for part in _PARTS}
    worst = max(loss, key=lambda part: (loss[part], part))
    return f"{format_seconds(loss[worst])} more {_PARTS[worst]}"


def _signed(difference: float, percent: str) -> str:
    return ("+" if difference >= 0 else "-") + percent


_DEGREES = frozenset({"dp_replicate", "dp_shard", "zero", "data_parallel"})
_CUTS = frozenset({"microbatch_size", "microbatches", "accumulation"})


def _without_conflicts(
    pins: dict[str, PinValue], asked: dict[str, object]
) -> dict[str, PinValue | object]:
    """What stays of the pins beside `asked`: a new degree or cut frees the others of its group."""
    freed: set[str] = set()
    for group in (_DEGREES | {"pp", "tp", "cp"}, _CUTS):
        if group & set(asked):
            freed |= group
    return {key: value for key, value in pins.items() if key not in freed}
