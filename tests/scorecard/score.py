"""Figures of merit: how far predictions are from what was measured, and how well they choose."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from statistics import fmean, median
from typing import Any

from tests.scorecard.published import Published

# A group of layouts says something about ranking from this many on.
LEAST_LAYOUTS = 3
# What is asked for of sources left out: figure, part of it, at least or at most, how much.
MARKS = (
    ("time", "median", "<=", 0.08),
    ("time", "p90", "<=", 0.25),
    ("time", "covered", ">=", 0.85),
    ("time", "covered", "<=", 0.95),
    ("time", "beyond", "<=", 0.05),
    ("memory", "median", "<=", 0.05),
    ("memory", "p90", "<=", 0.15),
    ("memory", "covered", ">=", 0.85),
    ("memory", "covered", "<=", 0.95),
    ("memory", "beyond", "<=", 0.05),
    ("choice", "correlation", ">=", 0.9),
    ("choice", "regret", "<=", 0.03),
    ("failures", "recall", ">=", 0.95),
    ("failures", "precision", ">=", 0.9),
)


@dataclass(frozen=True, slots=True)
class Interval:
    """A predicted value and its range, in seconds or GiB."""

    value: float
    low: float
    high: float

    def scaled(self, low: float, high: float) -> Interval:
        """The same value with ends at `low` and `high` times it."""
        return Interval(self.value, low * self.value, high * self.value)


@dataclass(frozen=True, slots=True)
class Scored:
    """A published run and what was predicted of it.

    Attributes:
        stack: preset that it was predicted with.
        kind: kind of stack, by which ranges are chosen.
        memory: by the counter and of the stage that the published figure means.
        reason: why there is no prediction; blank where there is one.
    """

    run: Published
    stack: str
    kind: str
    time: Interval | None = None
    memory: Interval | None = None
    fits: bool | None = None
    reason: str = ""

    def predicted(self, part: str) -> Interval | None:
        """Of "time" or "memory"."""
        return self.time if part == "time" else self.memory

    def measured(self, part: str) -> float | None:
        """Seconds or GiB; the peak of a run that failed is where it failed, and not counted."""
        if part == "time":
            return self.run.step_s
        return None if self.run.oom else self.run.memory_gib


@dataclass(frozen=True, slots=True)
class Errors:
    """Of one quantity over some rows; errors are |predicted / measured - 1|.

    Attributes:
        worst_row: where the largest error is.
        covered: share of measured values inside the range.
        beyond: share above its upper end: under-predictions that the range does not admit.
    """

    rows: int
    median: float
    p90: float
    worst: float
    worst_row: str
    bias: float
    covered: float
    beyond: float


@dataclass(frozen=True, slots=True)
class Choice:
    """Quality of the ranking of layouts, over groups of one model, sequence and number of devices.

    Attributes:
        correlation: mean rank correlation (Spearman).
        regret: mean of what the predicted best layout takes over the best one, less 1.
        best_failed: groups whose predicted best layout is known to have run out of memory.
    """

    groups: int
    correlation: float
    regret: float
    best_failed: int


@dataclass(frozen=True, slots=True)
class Failures:
    """Out of memory: of runs that failed how many were predicted, and of those predicted how many
    failed."""

    rows: int
    failed: int
    recall: float | None
    precision: float | None


def errors(rows: Iterable[Scored], part: str) -> Errors | None:
    """Of the "time" of a step or the peak "memory"."""
    results = []
    for row in rows:
        true, predicted = row.measured(part), row.predicted(part)
        if true is None or predicted is None:
            continue
        ratio = predicted.value / true
        inside = predicted.low <= true <= predicted.high
        name, above = row.run.row.row_id, true > predicted.high
        results.append((abs(ratio - 1), name, log(ratio), inside, above))
    if not results:
        return None
    results.sort()
    return Errors(
        rows=len(results),
        median=median(error for error, *_ in results),
        p90=results[min(len(results) - 1, int(0.9 * len(results)))][0],
        worst=results[-1][0],
        worst_row=results[-1][1],
        bias=exp(median(ratio for _, _, ratio, _, _ in results)) - 1,
        covered=fmean(inside for *_, inside, _ in results),
        beyond=fmean(above for *_, above in results),
    )


def failures(rows: Iterable[Scored]) -> Failures | None:
    """Of the rows that say whether they ran."""
    known = [(row.run.oom, not row.fits) for row in rows
             if row.run.oom is not None and row.fits is not None]  # fmt: skip
    if not known:
        return None
    failed = sum(oom for oom, _ in known)
    predicted = sum(said for _, said in known)
    right = sum(oom and said for oom, said in known)
    return Failures(
        rows=len(known),
        failed=failed,
        recall=right / failed if failed else None,
        precision=right / predicted if predicted else None,
    )


def choice(rows: Iterable[Scored]) -> Choice | None:
    """Within groups of (source, model, sequence, devices, samples a step) that differ in layout."""
    groups: dict[tuple[object, ...], list[tuple[Scored, float]]] = defaultdict(list)
    for scored in rows:
        row = scored.run.row
        key = (row.source, row.model_name, row.n_layers, row.hidden, row.n_heads, row.seq_len,
               row.gpu_type, row.n_gpus, row.dtype, row.global_batch)  # fmt: skip
        if scored.time is not None and (scored.run.step_s is not None or scored.run.oom):
            groups[key].append((scored, scored.time.value))
    correlations, regrets, failed = [], [], 0
    for group in groups.values():
        # Runs of one layout, on other days or with other releases, are one: their median.
        times: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
        for scored, predicted_s in group:
            if scored.run.step_s is not None:
                times[_layout(scored.run)].append((predicted_s, scored.run.step_s))
        if len(times) < LEAST_LAYOUTS:
            continue
        measured = {layout: median(m for _, m in result) for layout, result in times.items()}
        predicted = {layout: median(p for p, _ in result) for layout, result in times.items()}
        correlations.append(_spearman(list(predicted.values()), list(measured.values())))
        fitting = [pair for pair in group if pair[0].fits] or group
        best, _ = min(fitting, key=lambda pair: pair[1])
        if _layout(best.run) in measured:
            regrets.append(measured[_layout(best.run)] / min(measured.values()) - 1)
        else:
            failed += 1
    if not correlations:
        return None
    return Choice(
        groups=len(correlations),
        correlation=fmean(correlations),
        regret=fmean(regrets) if regrets else 0.0,
        best_failed=failed,
    )


def card(rows: Sequence[Scored]) -> dict[str, Any]:
    """Figures over all rows, by file and by kind of stack, and how many rows have none and why."""
    files: dict[str, list[Scored]] = defaultdict(list)
    kinds: dict[str, list[Scored]] = defaultdict(list)
    for row in rows:
        files[row.run.file].append(row)
        kinds[row.kind].append(row)
    return {
        "all": figures(rows),
        "files": {name: figures(files[name]) for name in sorted(files)},
        "kinds of stack": {name: figures(kinds[name]) for name in sorted(kinds)},
        "no answer": dict(sorted(Counter(row.reason for row in rows if row.reason).items())),
    }


def figures(rows: Sequence[Scored]) -> dict[str, Any]:
    """Of rows of high reliability, and with those of medium; None where no row says anything."""
    some = [row for row in rows if row.run.reliability != "low"]
    high = [row for row in some if row.run.reliability == "high"]
    results: dict[str, Any] = {"rows": len(rows)}
    for level, chosen in (("high", high), ("medium too", some)):
        parts = {
            "time": errors(chosen, "time"),
            "memory": errors(chosen, "memory"),
            "choice": choice(chosen),
            "failures": failures(chosen),
        }
        results[level] = {name: part and _rounded(asdict(part)) for name, part in parts.items()}
    return results


def headline(scores: Mapping[str, Any], part: str) -> Mapping[str, Any] | None:
    """Errors of rows of high reliability, of medium where there are no others; the rest of both."""
    actual: Mapping[str, Any] | None = scores["medium too"][part]
    return (scores["high"][part] or actual) if part in ("time", "memory") else actual


def marks(scores: Mapping[str, Any]) -> list[str]:
    """One line for each mark: the figure, what was asked for, and whether it is met."""
    lines = []
    for part, name, sign, bound in MARKS:
        best = headline(scores, part)
        value: float | None = best[name] if best else None
        if value is None:
            lines.append(f"{part} {name}: no rows")
            continue
        met = value <= bound if sign == "<=" else value >= bound
        lines.append(f"{part} {name} {value:.3f} {sign} {bound}: {'met' if met else 'missed'}")
    return lines


def _layout(run: Published) -> tuple[object, ...]:
    row = run.row
    return (row.dp, row.tp, row.pp, row.cp, row.ep, row.zero_stage, row.microbatch,
            row.virtual_stages, row.recompute)  # fmt: skip


def _spearman(one: Sequence[float], other: Sequence[float]) -> float:
    a, b = _ranks(one), _ranks(other)
    mean_a, mean_b = fmean(a), fmean(b)
    above = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    below = sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b)
    return above / below**0.5 if below else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    """Equal values share the mean of their ranks."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


def _rounded(facts: dict[str, object]) -> dict[str, object]:
    return {key: round(v, 4) if isinstance(v, float) else v for key, v in facts.items()}
