"""The outcome of cases: regret with its noise, rank correlation, errors, and the marks to reach.

Regret is the time of the chosen plan over that of the best plan that was run and fits, less one.
The chosen plan is run twice under two names; what these differ by is the noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from pydantic import Field

from advisor.decide.tree import LEAVES, Family, belongs
from advisor.inputs.policy import Policy
from engines.plan import Plan
from profiles.machine.cluster import ClusterProfile
from profiles.record import Document, Record

REPORT = Path(__file__).parents[1] / "validation" / "regret.json"
MEDIAN_REGRET, WORST_REGRET, CORRELATION = 0.03, 0.10, 0.9
"""The marks: of all cases, of each beyond its noise, and of each."""
TIE = Policy().simplicity_margin


class Row(Record):
    """One plan that was run.

    Attributes:
        seconds: of each timed step, on the slowest rank.
        is_final: it was timed by turns with the other fast ones; else alone, after it was built.
        peak_bytes: most that the tensors of a rank took in a step, on the fullest rank.
        predicted_s, predicted_peak_bytes, predicted_high_bytes: of the case's machines.
        in_leaf: it is of a family of the tree's leaf.
    """

    plan: str
    seconds: tuple[float, ...]
    is_final: bool = False
    peak_bytes: float
    predicted_s: float
    predicted_peak_bytes: float
    predicted_high_bytes: float
    in_leaf: bool

    @property
    def step_s(self) -> float:
        return median(self.seconds)


class Result(Document):
    """One case; also the state of a run that goes on after its ranks were started anew.

    Attributes:
        cluster: as benched on the spot, with the case's budget as its memory.
        leaf, families, dissent: as the decision says; families in the documents' order.
        plans: all that are run, the chosen one first, of so many `legal` ones.
        again: seconds of the chosen plan's second name.
        refused: plans that could not be run, and why; `failed_for_memory` if it is the chosen one,
            and its step did not fit the budget.
        measured_at: empty while the case is not done.
        took_s: from the first decision to the last step.
    """

    name: str
    cluster: ClusterProfile
    leaf: str
    families: tuple[str, ...]
    dissent: str | None
    plans: tuple[str, ...]
    legal: int
    rows: tuple[Row, ...] = ()
    again: tuple[float, ...] = ()
    refused: dict[str, str] = Field(default_factory=dict)
    failed_for_memory: bool = False
    measured_at: str = ""
    took_s: float = 0.0

    @property
    def limit_bytes(self) -> float:
        return self.cluster.device.memory_bytes.value

    @property
    def chosen(self) -> Row | None:
        """The plan that was taken; None if it could not be run."""
        return next((row for row in self.rows if row.plan == self.plans[0]), None)

    @property
    def fitting(self) -> list[Row]:
        """Plans whose tensors fit the budget; of those timed by turns, if there are any."""
        rows = [row for row in self.rows if row.peak_bytes <= self.limit_bytes]
        return [row for row in rows if row.is_final] or rows

    @property
    def chosen_s(self) -> float:
        """Under both of its names."""
        assert self.chosen is not None
        return median((*self.chosen.seconds, *self.again))

    @property
    def best(self) -> Row:
        """The fastest plan that fits."""
        return min(self.fitting, key=lambda row: row.step_s)

    @property
    def regret(self) -> float:
        """Of the chosen plan; infinite if it could not be run or did not fit."""
        if self.chosen is None or self.failed_for_memory or not self.fitting:
            return float("inf")
        if self.best is self.chosen:
            return 0.0
        return max(0.0, self.chosen_s / self.best.step_s - 1)

    @property
    def priced_regret(self) -> float:
        """Of the plan that was predicted fastest, in the leaf or not: `--objective time`."""
        fastest = min(self.fitting, key=lambda row: row.predicted_s, default=None)
        if fastest is None or fastest is self.chosen:
            return self.regret
        return max(0.0, fastest.step_s / self.best.step_s - 1)

    @property
    def noise(self) -> float:
        """Difference of the chosen plan's two names, as a fraction."""
        if self.chosen is None or not self.again:
            return 0.0
        one, other = self.chosen.step_s, median(self.again)
        return abs(one - other) / min(one, other)

    @property
    def correlation(self) -> float:
        """Of the order by prediction and the order by measurement."""
        return spearman([r.predicted_s for r in self.rows], [r.step_s for r in self.rows])

    @property
    def time_error(self) -> float:
        return median(abs(row.predicted_s / row.step_s - 1) for row in self.rows)

    @property
    def peak_error(self) -> float:
        return median(abs(row.predicted_peak_bytes / row.peak_bytes - 1) for row in self.rows)

    @property
    def order(self) -> dict[str, float]:
        """Seconds of the fastest fitting plan of each family of the leaf, in the documents'
        order."""
        reach = self.cluster.devices_per_node
        best: dict[str, float] = {}
        for name in self.families:
            own = [
                row.step_s
                for row in self.fitting
                if belongs(Plan.parse(row.plan), Family(name), devices_per_node=reach)
            ]
            if own:
                best[name] = min(own)
        return best

    @property
    def agrees(self) -> bool:
        """True if the first family of the leaf is as fast as any other of it, but for a tie."""
        seconds = list(self.order.values())
        return not seconds or seconds[0] <= (1 + TIE + self.noise) * min(seconds)

    @property
    def is_right(self) -> bool:
        """True if no plan outside of the leaf is faster than those in it, by more than a tie; or
        the report said so beforehand."""
        inside = [row.step_s for row in self.fitting if row.in_leaf]
        if not inside:
            return self.dissent is not None
        return self.dissent is not None or (
            min(inside) <= (1 + TIE + self.noise) * self.best.step_s
        )


class Report(Document):
    """All cases that were run, and on what.

    Attributes:
        broken: cases that could not be run, and why.
    """

    machine: str = ""
    torch: str = ""
    results: tuple[Result, ...] = ()
    broken: dict[str, str] = Field(default_factory=dict)

    def result(self, name: str) -> Result | None:
        return next((result for result in self.results if result.name == name), None)

    def having(self, result: Result, order: Sequence[str]) -> Report:
        """With this case, in place of what it was, in the order of `order`."""
        others = [other for other in self.results if other.name != result.name]
        place = {name: number for number, name in enumerate(order)}
        every = sorted([*others, result], key=lambda each: place.get(each.name, len(place)))
        left = {name: why for name, why in self.broken.items() if name != result.name}
        return self.model_copy(update={"results": tuple(every), "broken": left})

    def broke(self, name: str, why: str) -> Report:
        return self.model_copy(update={"broken": {**self.broken, name: why}})


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's rank correlation, with mean ranks where values are equal; 1 of fewer than two.

    >>> spearman([1.0, 2.0, 3.0], [10.0, 20.0, 15.0])
    0.5
    """
    if len(one) < 2:
        return 1.0
    first, second = _ranks(one), _ranks(other)
    mean = (len(one) - 1) / 2
    covariance = sum((a - mean) * (b - mean) for a, b in zip(first, second, strict=True))
    spread = sum((a - mean) ** 2 for a in first) * sum((b - mean) ** 2 for b in second)
    return covariance / spread**0.5 if spread else 1.0


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    last = {value: place for place, value in enumerate(ordered)}
    return [(ordered.index(value) + last[value]) / 2 for value in values]


def table(report: Report) -> str:
    """The report for a person, with the marks."""
    results = report.results
    lines = [
        f"{report.machine}, torch {report.torch}",
        f"{'case':<34}{'leaf':<24}{'run/legal':>11}{'step':>8}{'regret':>8}{'noise':>7}"
        f"{'rank':>6}{'time':>6}{'peak':>6}  order tree",
    ]
    for result in results:
        lines.append(_line(result))
        lines += _plans(result)
    lines += [f"{name}: not run: {why.splitlines()[-1]}" for name, why in report.broken.items()]
    return "\n".join([*lines, *(marks(results) if results else [])])


def _line(result: Result) -> str:
    run = f"{len(result.rows)}/{result.legal}"
    head = f"{result.name:<34}{result.leaf:<24}{run:>11}"
    if result.chosen is None or not result.fitting:
        return f"{head}  the chosen plan could not be run: {result.refused}"
    return (
        f"{head}{result.chosen_s:>7.3f}s{result.regret:>8.1%}{result.noise:>7.1%}"
        f"{result.correlation:>6.2f}{result.time_error:>6.0%}{result.peak_error:>6.0%}"
        f"  {'yes' if result.agrees else 'no':<5}"
        f" {'right' if result.is_right else 'wrong'}{' (dissent)' if result.dissent else ''}"
        f"{'  FAILED FOR MEMORY' if result.failed_for_memory else ''}"
    )


def _plans(result: Result) -> list[str]:
    """The chosen plan and, where it is another, the best."""
    rows = [("chosen", result.chosen)]
    if result.fitting and result.best is not result.chosen:
        rows.append(("best", result.best))
    return [
        f"    {word:<7} {_shown(row.plan)}: {row.step_s:.3f} s, predicted {row.predicted_s:.3f}"
        for word, row in rows
        if row is not None
    ]


def _shown(text: str) -> str:
    """A plan without the list of its split layers."""
    plan = Plan.parse(text)
    words = str(plan.model_copy(update={"tensor_styles": ()})).split()
    return " ".join(words)


def marks(results: Sequence[Result]) -> list[str]:
    """The figures of all cases beside their marks, and the leaves of the tree that were taken."""
    regrets = [result.regret for result in results]
    beyond = max(results, key=lambda result: result.regret - result.noise)
    least = min(results, key=lambda result: result.correlation)
    reached = {result.leaf for result in results}
    missing = [leaf.name for leaf in LEAVES if leaf.name not in reached]
    failed = sum(result.failed_for_memory for result in results)
    wrong = [result.name for result in results if not result.is_right]
    return [
        "",
        f"regret: median {median(regrets):.1%} (mark {MEDIAN_REGRET:.0%}), worst beyond its noise"
        f" {beyond.regret - beyond.noise:.1%} of {beyond.name} (mark {WORST_REGRET:.0%})",
        f"of the plans predicted fastest, in the leaf or not: median"
        f" {median(result.priced_regret for result in results):.1%}, worst"
        f" {max(result.priced_regret for result in results):.1%}",
        f"picks that failed for memory: {failed} (mark 0)",
        f"rank correlation: median {median(r.correlation for r in results):.2f}, least"
        f" {least.correlation:.2f} of {least.name} (mark {CORRELATION})",
        f"error, median of cases: time {median(r.time_error for r in results):.0%}, peak of"
        f" tensors {median(r.peak_error for r in results):.0%}",
        f"documents' order agrees in {sum(r.agrees for r in results)} of {len(results)};"
        f" tree right or dissent shown in {len(results) - len(wrong)}"
        + (f", not in {'; '.join(wrong)}" if wrong else ""),
        f"leaves: {len(reached)} of {len(LEAVES)}"
        + (f", without {', '.join(missing)}" if missing else ""),
    ]
