"""Results of the soak: trainings under kills, and saves broken off at every file event."""

from __future__ import annotations

from pathlib import Path

from profiles.record import Document, Record

REPORT = Path(__file__).parents[1] / "validation" / "soak.json"


class Soaked(Record):
    """A training that was killed again and again, compared with one that was left alone.

    Attributes:
        kills: by what was killed and when, as "rank, save" or "launcher, start".
        attempts: times that the ranks were started.
        repeated_steps: steps that were done more than once, over all attempts.
        differences: the first ones; none where losses and the final state are equal bit for bit
            and no complete save was lost.
    """

    name: str
    plan: str
    ranks: int
    steps: int
    kills: dict[str, int]
    attempts: int
    repeated_steps: int
    seconds: float
    differences: tuple[str, ...] = ()


class CrashPoints(Record):
    """Saves of two states, each ended by SIGKILL at another file event of one rank.

    Attributes:
        points: file events of each rank's save.
        old, new: loads afterwards that gave the state before, or the one being saved.
        differences: of loads that gave neither.
    """

    ranks: int
    points: tuple[int, ...]
    old: int
    new: int
    differences: tuple[str, ...] = ()


class Repeated(Record):
    """One thing done again and again in a process, which should hold no more than before.

    Attributes:
        first_mib, last_mib: resident memory after a tenth of the repetitions, and after the last.
        files, threads: at the end.
        differences: growth beyond the bound of `tests.soak.load`.
    """

    name: str
    count: int
    first_mib: float
    last_mib: float
    files: int
    threads: int
    differences: tuple[str, ...] = ()


class PlanPair(Record):
    """A training that was saved under one plan and went on under another.

    Attributes:
        steps: after the load, compared with those of the training that saved, which went on too.
        weights, states: largest difference of an element, of the optimizer's states too.
        losses: largest relative difference.
        differences: weights or states with other bits, losses beyond the bound of
            `tests.soak.pairs`.
    """

    saved: str
    loaded: str
    saved_plan: str
    loaded_plan: str
    steps: int
    weights: float
    states: float
    losses: float
    seconds: float
    differences: tuple[str, ...] = ()


class Wait(Record):
    """A fault of one rank of a running training, and the end of all others.

    Attributes:
        seconds: from the fault until the last of the other ranks raised.
        most_s: mark.
        named: the errors of all of them name the rank.
        collective: that one of them was in, if an error says it.
        message: first line of an error; of one that names no rank, if there is one.
    """

    name: str
    plan: str
    fault: str
    seconds: float
    most_s: float
    named: bool
    collective: str
    message: str
    differences: tuple[str, ...] = ()


class Report(Document):
    """All of it, with the machine and the seed."""

    measured_at: str = ""
    machine: str = ""
    torch: str = ""
    seed: int = 0
    trainings: tuple[Soaked, ...] = ()
    crash_points: tuple[CrashPoints, ...] = ()
    repeated: tuple[Repeated, ...] = ()
    pairs: tuple[PlanPair, ...] = ()
    waits: tuple[Wait, ...] = ()

    @property
    def differences(self) -> list[str]:
        """Of all parts."""
        first = (*self.trainings, *self.crash_points, *self.repeated)
        parts = (*first, *self.pairs, *self.waits)
        return [text for part in parts for text in part.differences]

    def with_pair(self, pair: PlanPair, *, order: list[str]) -> Report:
        """With this pair in place of an older one, in the order of the plans' names."""
        every = {(each.saved, each.loaded): each for each in (*self.pairs, pair)}
        keys = sorted(every, key=lambda key: [order.index(name) for name in key])
        return self.model_copy(update={"pairs": tuple(every[key] for key in keys)})

    def with_wait(self, wait: Wait, *, order: list[str]) -> Report:
        """As `with_pair`; faults of a plan stay in the order in which they came."""
        every = {(each.name, each.fault): each for each in (*self.waits, wait)}
        keys = sorted(every, key=lambda key: order.index(key[0]))
        return self.model_copy(update={"waits": tuple(every[key] for key in keys)})


def table(report: Report) -> str:
    """One line for each plan and each number of ranks."""
    lines = [f"{report.machine}, torch {report.torch}, {report.measured_at}, seed {report.seed}"]
    for each in report.trainings:
        kills = ", ".join(f"{count} {what}" for what, count in sorted(each.kills.items()))
        lines.append(
            f"{each.name:6} {each.plan}: {each.steps} steps on {each.ranks} ranks,"
            f" {sum(each.kills.values())} kills ({kills}), {each.repeated_steps} steps repeated,"
            f" {each.seconds:.0f} s: {_verdict(each.differences)}"
        )
    for points in report.crash_points:
        count = " + ".join(map(str, points.points))
        lines.append(
            f"save on {points.ranks} ranks, {count} file events: {points.old} loads gave the old"
            f" state, {points.new} the new one: {_verdict(points.differences)}"
        )
    lines += [
        f"{each.count:,} {each.name}: {each.first_mib:.0f} MiB after a tenth,"
        f" {each.last_mib:.0f} at the end, {each.files} open files, {each.threads} threads:"
        f" {_verdict(each.differences)}"
        for each in report.repeated
    ]
    lines += [
        f"{each.saved} to {each.loaded}: weights differ by {each.weights:.2g}, states by"
        f" {each.states:.2g}, losses of {each.steps} steps by {each.losses:.2g},"
        f" {each.seconds:.1f} s: {_verdict(each.differences)}"
        for each in report.pairs
    ]
    lines += [
        f"{each.name:6} {each.fault}: {each.seconds:.1f} s of at most {each.most_s:.0f},"
        f" {'named' if each.named else 'not named'}: {each.message}"
        for each in report.waits
    ]
    return "\n".join(lines)


def _verdict(differences: tuple[str, ...]) -> str:
    return "equal" if not differences else "; ".join(differences)
