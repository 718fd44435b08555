"""Measurements: races, capacities and planners' answers, in a file that grows."""

from __future__ import annotations

import statistics
from pathlib import Path

from pydantic import Field

from profiles.machine.cluster import ClusterProfile
from profiles.record import Document, Record

RESULTS = Path(__file__).parents[1] / "validation" / "peers.json"
BOUND, LOSSY_BOUND = 1e-3, 5e-2
"""Of a loss, relative to that of the same training in one process: equal work, and work with
rounded gradients. A step of AdamW turns the rounding of tiny gradients into a part of its rate."""


class Entry(Record):
    """One script in a race.

    Attributes:
        plan: what it settled on, where it chose.
        turns_s: seconds of each turn, of the slowest rank.
        loss_error: largest relative difference of a step's loss from the reference.
        peak_bytes: most bytes of live tensors in a step, on the fullest rank.
        left_out: why it did not run.
    """

    script: str
    plan: str = ""
    turns_s: tuple[float, ...] = ()
    loss_error: float | None = None
    peak_bytes: int = 0
    left_out: str = ""
    is_lossy: bool = False

    @property
    def works_equally(self) -> bool:
        """True if its losses are those of the reference, within the stated bound."""
        bound = LOSSY_BOUND if self.is_lossy else BOUND
        return self.loss_error is not None and self.loss_error <= bound

    @property
    def counts(self) -> bool:
        """True if its speed may be compared."""
        return bool(self.turns_s) and self.works_equally


class Race(Record):
    """All scripts on one model and link, a turn each, again and again.

    Attributes:
        rows: of a step, over all ranks.
        steps: of a turn.
    """

    subject: str
    link: str
    parameters: int
    rows: int
    steps: int
    entries: tuple[Entry, ...]

    def entry(self, script: str) -> Entry | None:
        """Look a script up; None if it did not take part."""
        return next((entry for entry in self.entries if entry.script == script), None)

    def rows_per_s(self, entry: Entry) -> float:
        """Median over its turns."""
        return self.rows * self.steps / statistics.median(entry.turns_s)


def lead(ours: Entry, theirs: Entry) -> tuple[float, float, float]:
    """Our throughput over theirs: median over the rounds, and quartiles."""
    ratios = [b / a for a, b in zip(ours.turns_s, theirs.turns_s, strict=True)]
    if len(ratios) < 2:
        return ratios[0], ratios[0], ratios[0]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return statistics.median(ratios), low, high


class Capacity(Record):
    """The deepest model that a script trains within `limit_bytes` of tensors a rank.

    Attributes:
        depth, parameters: of that model.
        plan: of the deepest, where the script chose.
        peak_bytes: of the deepest.
    """

    subject: str
    script: str
    limit_bytes: int
    depth: int = 0
    parameters: int = 0
    plan: str = ""
    peak_bytes: int = 0
    left_out: str = ""


class Answer(Record):
    """A planner's estimate of one script's run.

    Attributes:
        answer_s: until it said so.
        peak_bytes, step_s: None where it says nothing of it.
        note: what it counts, or why it gives no answer.
    """

    planner: str
    subject: str
    link: str
    script: str
    answer_s: float = 0.0
    peak_bytes: float | None = None
    step_s: float | None = None
    note: str = ""


class Peers(Document):
    """A run of everything.

    Attributes:
        versions: of the packages that took part, and why others did not.
        clusters: by link, as benched before its races.
    """

    measured_at: str = ""
    machine: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    clusters: dict[str, ClusterProfile] = Field(default_factory=dict)
    races: tuple[Race, ...] = ()
    capacities: tuple[Capacity, ...] = ()
    answers: tuple[Answer, ...] = ()

    def race(self, subject: str, link: str) -> Race | None:
        """Look a race up; None if it was not run."""
        places = {(race.subject, race.link): race for race in self.races}
        return places.get((subject, link))

    def with_race(self, race: Race) -> Peers:
        """Put a race in the place of an earlier one."""
        rest = [r for r in self.races if (r.subject, r.link) != (race.subject, race.link)]
        return self.model_copy(update={"races": (*rest, race)})

    def with_capacity(self, capacity: Capacity) -> Peers:
        """Put a capacity in the place of an earlier one."""
        place = (capacity.subject, capacity.script)
        rest = [c for c in self.capacities if (c.subject, c.script) != place]
        return self.model_copy(update={"capacities": (*rest, capacity)})

    def with_answers(self, answers: tuple[Answer, ...]) -> Peers:
        """Put all answers in the place of earlier ones."""
        return self.model_copy(update={"answers": answers})
