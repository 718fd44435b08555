"""Answers to inverse questions, and a search for the largest size that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from advisor.decide.comparison import nearest_miss, title
from advisor.decide.decide import decide
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Objective, Policy
from advisor.search.ranking import Candidate
from engines.plan import Offload, PartialPlan, Plan
from profiles.errors import InputError
from profiles.record import Record
from profiles.units import format_gib, format_seconds


class Answer(Record):
    """Answer to an inverse question: a number, its range, its plan, and the failing neighbor.

    Attributes:
        question: in words.
        value, unit: the number; for memory questions at the upper end of the predicted peak.
        low, high: the same question at the ends of the range of the estimates.
        plan: the one to take there.
        step_s, peak_high_bytes: of that plan.
        verified: sentences: the neighbour that fails, and by how much.
        notes: what was assumed or changed for the answer.
    """

    question: str
    value: float
    unit: str
    low: float
    high: float
    plan: Plan
    step_s: float
    peak_high_bytes: float
    verified: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        amount = f"{self.value:g} {self.unit}"
        if (self.low, self.high) != (self.value, self.value):
            amount += f" ({self.low:g} to {self.high:g})"
        lines = [
            f"{self.question} {amount}",
            f"  {title(self.plan)}: up to {format_gib(self.peak_high_bytes)},"
            f" {format_seconds(self.step_s)} a step",
            f"  {self.plan}",
            *(f"  {sentence}" for sentence in (*self.verified, *self.notes)),
        ]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Trial:
    """Plan of least memory for some facts, fitting or not."""

    facts: Facts
    smallest: Candidate
    usable_bytes: float

    @property
    def fits(self) -> bool:
        return self.smallest.fits

    @property
    def may_fit(self) -> bool:
        """Return True if the lower end of its peak fits the memory."""
        return self.smallest.estimate.peak_low_bytes <= self.usable_bytes

    @property
    def because(self) -> str:
        """Describe the missing memory; empty if it fits."""
        finding = self.smallest.finding
        return f"{title(self.smallest.plan)} {finding.because}" if finding else ""


def trial(facts: Facts, policy: Policy, partial: PartialPlan) -> Trial:
    """Decide for the least memory among plans that keep `partial`.

    Raises:
        PlanError: `partial` allows no legal plan.
    """
    frugal = policy.model_copy(update={"objective": Objective.MEMORY})
    choice = decide(facts, policy=frugal, partial=partial)
    smallest = choice.winner or nearest_miss(choice.weighed)
    return Trial(facts, smallest, policy.usable_bytes(facts.cluster.device))


def on_device(partial: PartialPlan) -> PartialPlan:
    """`partial` with states on the device, unless it says otherwise: questions about memory are
    about the device's, and main memory would answer most of them."""
    return partial if partial.fixes("offload") else partial.fixing(offload=Offload.NONE)


def taken(facts: Facts, policy: Policy, partial: PartialPlan) -> Candidate:
    """The plan to take where something is known to fit."""
    winner = decide(facts, policy=policy, partial=partial).winner
    assert winner is not None
    return winner


@dataclass(frozen=True, slots=True)
class Largest:
    """Largest amount that fits, the next one, and the largest that may fit.

    `too_large` and `refused` give the reason why the next one fails: memory, or no such amount.
    """

    value: int
    fits: Trial
    may_fit: int
    next: int
    too_large: Trial | None
    refused: str


def largest(
    check: Callable[[int], Trial], *, start: int, step: int, highest: int
) -> Largest | Trial:
    """The largest multiple of `step` up to `highest` for which `check` fits.

    More needs more memory, so that a bisection finds it; the next multiple was tried.

    Returns:
        The trial of the smallest amount, where that does not fit.
    """
    known: dict[int, Trial | str] = {}

    def tried(amount: int) -> Trial | str:
        if amount not in known:
            try:
                known[amount] = check(amount)
            except InputError as error:
                known[amount] = error.what
        return known[amount]

    def fits(amount: int) -> bool:
        outcome = tried(amount)
        return isinstance(outcome, Trial) and outcome.fits

    def may_fit(amount: int) -> bool:
        outcome = tried(amount)
        return isinstance(outcome, Trial) and outcome.may_fit

    first = tried(step)
    if isinstance(first, str):
        raise InputError(first)
    if not first.fits:
        return first
    value = _last(fits, start=start, step=step, highest=highest)
    fitting, beyond = tried(value), tried(value + step)
    assert isinstance(fitting, Trial)
    return Largest(
        value=value,
        fits=fitting,
        may_fit=_last(may_fit, start=value, step=step, highest=highest),
        next=value + step,
        too_large=beyond if isinstance(beyond, Trial) else None,
        refused=beyond if isinstance(beyond, str) else "",
    )


def _last(holds: Callable[[int], bool], *, start: int, step: int, highest: int) -> int:
    """Last multiple of `step` for which `holds`; it holds for the first."""
    low, high = 1, max(2, start // step)
    while high * step <= highest and holds(high * step):
        low, high = high, 2 * high
    high = min(high, highest // step + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle * step) else (low, middle)
    return low * step
