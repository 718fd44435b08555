"""Sensitivity: the smallest change of one fact that makes another kind of plan the answer.

Each amount takes a decision of its own. A coarse scan goes in both directions, nearest first, as
the answer may change and change back; then the step in which it changed is bisected. Decisions were
made on both sides of a reported crossover.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp2, log2, sqrt

from advisor.decide.comparison import kind, kind_words, title
from advisor.inputs.changed_facts import Lever, shown, step, value, varied
from advisor.inputs.facts import Facts
from advisor.search.ranking import Candidate
from engines.plan import Plan
from profiles.errors import InputError
from profiles.record import Record
from profiles.units import format_seconds

# From a sixteenth to sixteen times: four doublings each way, several generations of hardware.
OCTAVES = 4
# Points per doubling. An answer that changes and changes back within a factor of 1.41 is missed.
PER_OCTAVE = 2
# Crossovers are located to 5 %, about the precision to which links and memory are known.
RESOLUTION = 0.05


class Crossover(Record):
    """Amount of one fact at which the answer changes.

    Attributes:
        now: the amount of the decision.
        stays: the farthest amount towards `turns` with the same answer.
        turns: the nearest amount with another answer.
        factor: `turns` over `now`.
        before, after: the kinds of plan, in words.
        plan: the plan at `turns`; None if nothing fits there.
        because: the step time at `turns`.
    """

    lever: Lever
    now: float
    stays: float
    turns: float
    factor: float
    before: str
    after: str
    plan: Plan | None
    because: str

    def __str__(self) -> str:
        way = "down" if self.factor < 1 else "up"
        return (
            f"{self.lever}: {way} from {shown(self.lever, self.now)} to"
            f" {shown(self.lever, self.turns)} ({self.factor:.3g} x) the answer becomes"
            f" {self.after}; at {shown(self.lever, self.stays)} it is still {self.before}."
            f" {self.because}"
        )


class Insensitive(Record):
    """Fact that does not change the answer within the bounds, or cannot be varied, and why."""

    lever: Lever
    because: str

    def __str__(self) -> str:
        return f"{self.lever}: {self.because}"


class Sensitivity(Record):
    """Changes of facts that change the answer, the smallest factor first; and facts that do not."""

    turns: tuple[Crossover, ...]
    steady: tuple[Insensitive, ...]

    @property
    def smallest(self) -> Crossover | None:
        return self.turns[0] if self.turns else None

    def __str__(self) -> str:
        return "\n".join(str(each) for each in (*self.turns, *self.steady))


Decide = Callable[[Facts], Candidate | None]
"""The plan for some facts: None if nothing fits, InputError if no plan is legal."""


def flip(facts: Facts, decide: Decide, *, levers: Sequence[Lever] = tuple(Lever)) -> Sensitivity:
    """Find the smallest change of `levers` that changes the kind of plan that `decide` returns.

    A kind is the axes of a plan and its sharding, not its degrees and microbatches. All levers are
    scanned in step until the first crossover; pass a single lever to follow that one farther.
    """
    crossovers: list[Crossover] = []
    steady, scans = [], []
    for lever in levers:
        try:
            scans.append(_Scan(facts, decide, lever))
        except InputError as error:
            steady.append(Insensitive(lever=lever, because=f"cannot be varied: {error.what}"))
    for exponent in range(1, OCTAVES * PER_OCTAVE + 1):
        crossovers = [crossover for scan in scans if (crossover := scan.crossover(exponent))]
        if crossovers:
            crossovers.sort(key=lambda crossover: abs(log2(crossover.factor)))
            break
    crossed = {crossover.lever for crossover in crossovers}
    ending = "; not scanned farther" if crossovers else ""
    steady += [
        Insensitive(lever=scan.lever, because=f"{scan.stays}{ending}")
        for scan in scans
        if scan.lever not in crossed
    ]
    return Sensitivity(turns=tuple(crossovers), steady=tuple(steady))


class _Scan:
    """Answers along one lever, each decided once.

    Attributes:
        step: amounts are multiples of it; None for any real number.
        reached: the farthest amounts upwards (1) and downwards (-1) with the same answer.
        refused: reason why an amount within the bounds is impossible.
    """

    def __init__(self, facts: Facts, decide: Decide, lever: Lever) -> None:
        self.lever = lever
        self.now = value(facts, lever)
        self.step = step(facts, lever)
        self.reached = {1: self.now, -1: self.now}
        self.refused = ""
        self._facts = facts
        self._decide = decide
        self._known: dict[float, Candidate | None] = {}

    def answer(self, amount: float) -> Candidate | None:
        """Return the plan for an amount; None if nothing fits.

        Raises:
            InputError: there is no such amount, or no legal plan for it.
        """
        if amount not in self._known:
            self._known[amount] = self._decide(varied(self._facts, self.lever, amount))
        return self._known[amount]

    def changes(self, amount: float) -> bool:
        """True if the answer for `amount` is of another kind."""
        there, here = self.answer(amount), self.answer(self.now)
        return (there and kind(there.plan)) != (here and kind(here.plan))

    def crossover(self, exponent: int) -> Crossover | None:
        """Look `exponent` steps up and down, and return the nearest crossover."""
        brackets = []
        for direction in (1, -1):
            amount = self._amount(direction * exponent)
            if amount <= 0 or amount == self.reached[direction]:
                continue
            try:
                if self.changes(amount):
                    brackets.append(_Bracket(self, self.reached[direction], amount))
                else:
                    self.reached[direction] = amount
            except InputError as error:
                words = f"; {shown(self.lever, amount)} is not possible: {error.what}"
                self.refused = self.refused or words
        return _nearest(brackets).crossover() if brackets else None

    def _amount(self, exponent: int) -> float:
        amount = self.now * exp2(exponent / PER_OCTAVE)
        return amount if self.step is None else round(amount / self.step) * self.step

    def between(self, one: float, other: float) -> float | None:
        """Return the middle of two amounts; None if they are close enough."""
        low, high = sorted((one, other))
        if self.step is None:
            return sqrt(low * high) if high / low > 1 + RESOLUTION else None
        middle = (low + high) / 2 // self.step * self.step
        return middle if low < middle < high else None

    @property
    def stays(self) -> str:
        """Bounds within which the answer stays, in words."""
        low, high = (shown(self.lever, self.reached[direction]) for direction in (-1, 1))
        return f"the answer stays from {low} to {high}{self.refused}"


@dataclass(slots=True)
class _Bracket:
    """Bracket of a crossover: the answer is the same at `stays`, another at `turns`."""

    scan: _Scan
    stays: float
    turns: float

    def octaves(self, amount: float) -> float:
        """Distance of an amount from the present one, in doublings."""
        return abs(log2(amount / self.scan.now))

    def halve(self) -> bool:
        """Halve the bracket; return False if it is narrow enough."""
        middle = self.scan.between(self.stays, self.turns)
        if middle is None:
            return False
        try:
            changed = self.scan.changes(middle)
        except InputError:  # no legal plan in the middle: the bracket cannot be narrowed
            return False
        self.stays, self.turns = (self.stays, middle) if changed else (middle, self.turns)
        return True

    def crossover(self) -> Crossover:
        """Return the crossover as located so far."""
        scan = self.scan
        before, after = scan.answer(scan.now), scan.answer(self.turns)
        assert before is not None  # the decision itself
        if after is None:
            because = "No plan fits there"
        else:
            seconds = format_seconds(after.estimate.step_s)
            because = f"There {title(after.plan)} takes {seconds} a step"
        return Crossover(
            lever=scan.lever,
            now=scan.now,
            stays=self.stays,
            turns=self.turns,
            factor=self.turns / scan.now,
            before=kind_words(before.plan),
            after=kind_words(after.plan) if after else "that nothing fits",
            plan=after.plan if after else None,
            because=because,
        )


def _nearest(brackets: list[_Bracket]) -> _Bracket:
    """Narrow the brackets until the nearest is known to the resolution, and return it."""
    moving = list(brackets)
    while moving:
        bracket = min(moving, key=lambda one: one.octaves(one.stays))
        if not bracket.halve():
            moving.remove(bracket)
        least = min(one.octaves(one.turns) for one in brackets)
        moving = [one for one in moving if one.octaves(one.stays) < least]
    return min(brackets, key=lambda one: one.octaves(one.turns))
