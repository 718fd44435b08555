"""The flip: the smallest change of one fact that makes another kind of plan the answer.

Every value is decided on anew: first a coarse scan of all facts in both directions, nearest first,
as the answer may change and change back; then a bisection of the step in which it changed. Both
sides of the place that is reported were decided on.
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

# A sixteenth to sixteen times: from one generation of links or memory to four doublings away.
OCTAVES = 4
# Points tried in each doubling. An answer that comes and goes within a factor of 1.41 is not seen.
PER_OCTAVE = 2
# A change is placed to one part in twenty: as finely as links and memory in use are known.
RESOLUTION = 0.05


class Turn(Record):
    """Where an amount of one fact changes the answer.

    Attributes:
        now: the amount that was decided from.
        stays: the farthest amount towards `turns` at which the answer was seen to stay.
        turns: the nearest at which it was seen to be another.
        factor: `turns` over `now`.
        before, after: the kinds of plan, in words; `plan` is the one at `turns`, None where nothing
            fits there.
        because: the steps there.
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


class Steady(Record):
    """A fact that does not change the answer within the bounds, or cannot be varied, and why."""

    lever: Lever
    because: str

    def __str__(self) -> str:
        return f"{self.lever}: {self.because}"


class Flip(Record):
    """What would change the answer: the smallest change, as a factor, first."""

    turns: tuple[Turn, ...]
    steady: tuple[Steady, ...]

    @property
    def smallest(self) -> Turn | None:
        return self.turns[0] if self.turns else None

    def __str__(self) -> str:
        return "\n".join(str(found) for found in (*self.turns, *self.steady))


Decide = Callable[[Facts], Candidate | None]
"""The plan for some facts; None where nothing fits, InputError where they allow no legal plan."""


def flip(facts: Facts, decide: Decide, *, levers: Sequence[Lever] = tuple(Lever)) -> Flip:
    """The smallest change of `levers` that changes the kind of plan that `decide` gives.

    A kind is which axes a plan uses and what its replicas shard: degrees and microbatches are not
    looked at. All levers are scanned side by side and the scan ends where the first of them turns,
    to within a step of it; ask for one lever to follow it farther.
    """
    found: list[Turn] = []
    steady, scans = [], []
    for lever in levers:
        try:
            scans.append(_Scan(facts, decide, lever))
        except InputError as error:
            steady.append(Steady(lever=lever, because=f"cannot be varied: {error.what}"))
    for exponent in range(1, OCTAVES * PER_OCTAVE + 1):
        turns = [turn for scan in scans if (turn := scan.turn(exponent))]
        if turns:
            found = sorted(turns, key=lambda turn: abs(log2(turn.factor)))
            break
    turned = {turn.lever for turn in found}
    ending = "; not looked at farther" if found else ""
    steady += [
        Steady(lever=scan.lever, because=f"{scan.stays}{ending}")
        for scan in scans
        if scan.lever not in turned
    ]
    return Flip(turns=tuple(found), steady=tuple(steady))


class _Scan:
    """The answers along one lever, each decided on once.

    Attributes:
        step: amounts are multiples of it; None for any real number.
        reached: the farthest amounts upwards (1) and downwards (-1) at which the answer stays.
        refused: why an amount on the way cannot be.
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
        """None: nothing fits. Raises InputError where there is no such amount, or no legal plan."""
        if amount not in self._known:
            self._known[amount] = self._decide(varied(self._facts, self.lever, amount))
        return self._known[amount]

    def changes(self, amount: float) -> bool:
        """Whether the answer there is of another kind."""
        found, here = self.answer(amount), self.answer(self.now)
        return (found and kind(found.plan)) != (here and kind(here.plan))

    def turn(self, exponent: int) -> Turn | None:
        """The nearest change so many steps of the scan away, up or down."""
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
                words = f"; {shown(self.lever, amount)} cannot be: {error.what}"
                self.refused = self.refused or words
        return _nearest(brackets).turn() if brackets else None

    def _amount(self, exponent: int) -> float:
        amount = self.now * exp2(exponent / PER_OCTAVE)
        return amount if self.step is None else round(amount / self.step) * self.step

    def between(self, one: float, other: float) -> float | None:
        """The middle, None where they are as good as neighbours."""
        low, high = sorted((one, other))
        if self.step is None:
            return sqrt(low * high) if high / low > 1 + RESOLUTION else None
        middle = (low + high) / 2 // self.step * self.step
        return middle if low < middle < high else None

    @property
    def stays(self) -> str:
        """Between which amounts the answer was seen to stay, in words."""
        low, high = (shown(self.lever, self.reached[direction]) for direction in (-1, 1))
        return f"the answer stays from {low} to {high}{self.refused}"


@dataclass(slots=True)
class _Bracket:
    """A change lies between an amount at which the answer stays and one at which it turns."""

    scan: _Scan
    stays: float
    turns: float

    def octaves(self, amount: float) -> float:
        """How far an amount is from what is now."""
        return abs(log2(amount / self.scan.now))

    def halve(self) -> bool:
        """Whether the change could be placed better."""
        middle = self.scan.between(self.stays, self.turns)
        if middle is None:
            return False
        try:
            changed = self.scan.changes(middle)
        except InputError:  # no legal plan for that amount: both sides are as near as can be
            return False
        self.stays, self.turns = (self.stays, middle) if changed else (middle, self.turns)
        return True

    def turn(self) -> Turn:
        """As it is placed now."""
        scan = self.scan
        before, after = scan.answer(scan.now), scan.answer(self.turns)
        assert before is not None  # it was decided on
        if after is None:
            because = "No plan fits there"
        else:
            seconds = format_seconds(after.estimate.step_s)
            because = f"There {title(after.plan)} takes {seconds} a step"
        return Turn(
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
    """The nearest change, placed as finely as it is looked for; what is farther is left alone."""
    moving = list(brackets)
    while moving:
        bracket = min(moving, key=lambda one: one.octaves(one.stays))
        if not bracket.halve():
            moving.remove(bracket)
        least = min(one.octaves(one.turns) for one in brackets)
        moving = [one for one in moving if one.octaves(one.stays) < least]
    return min(brackets, key=lambda one: one.octaves(one.turns))
