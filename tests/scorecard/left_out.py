"""Three ways to score: constants as they are, each publisher left out of the fit, and of the rules.

Left out of the fit means of everything that its own figures could have decided: constants, ranges
and the reading of memory figures. What is left out of the rules too are the rows, among those, that
rest on no rule that was chosen with a file of that publisher in view.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from multiprocessing import get_context
from typing import Any

from tests.scorecard.calibrate import fit, settings
from tests.scorecard.model import Model, Reading
from tests.scorecard.published import Published
from tests.scorecard.rules import Rules
from tests.scorecard.score import Interval, Scored

PARTS = ("time", "memory")
# Nine of ten between the ends, and as many beyond either.
TAIL = 0.05
# Fewer residuals of a kind of stack say less of its tails than those of all kinds.
LEAST_RESIDUALS = 20


@dataclass(frozen=True, slots=True)
class Residual:
    """Measured over predicted of one row, by constants that its publisher had no part in."""

    kind: str
    ratio: float
    weight: float


# Ends over the predicted value, by part and kind of stack; "" stands for kinds with too few rows.
Ranges = Mapping[str, Mapping[str, tuple[float, float]]]


def by_publisher(rules: Rules, runs: Sequence[Published]) -> dict[str, list[Published]]:
    """The runs of each publisher, by name."""
    actual: dict[str, list[Published]] = defaultdict(list)
    for run in runs:
        actual[rules.publisher(run.file)].append(run)
    return {name: actual[name] for name in sorted(actual)}


def names_without(rules: Rules, runs: Sequence[Published]) -> dict[str, tuple[str, ...]]:
    """Each publisher and each pair of them, by what their names joined are."""
    names = list(by_publisher(rules, runs))
    return {"+".join(some): some for size in (1, 2) for some in combinations(names, size)}


def fits_without(model: Model, rules: Rules, runs: Sequence[Published]) -> dict[str, Any]:
    """The constants fitted without each publisher, and each pair of them."""
    jobs = names_without(rules, runs)

    def fitted(key: str) -> Any:
        names = jobs[key]
        others = [run for run in runs if rules.publisher(run.file) not in names]
        return fit(model, others, rules.priors(), reading_without(rules, names))

    return dict(zip(jobs, _each(fitted, list(jobs)), strict=True))


def _each(work: Callable[[str], Any], keys: Sequence[str]) -> list[Any]:
    """`work` of every key, on all cores; children inherit what it closes over."""
    global _work
    _work = work
    with get_context("fork").Pool() as pool:
        return pool.map(_do, keys, chunksize=1)


_work: Callable[[str], Any] | None = None


def _do(key: str) -> Any:
    assert _work is not None
    return _work(key)


def ranges_without(
    model: Model, rules: Rules, runs: Sequence[Published], constants: Mapping[str, Any]
) -> dict[str, Ranges]:
    """The ranges that score each publisher; under "" those from all, for sources yet unseen."""
    return {
        name: ranges_of(model, rules, runs, constants, name)
        for name in ("", *by_publisher(rules, runs))
    }


def ranges_of(
    model: Model,
    rules: Rules,
    runs: Sequence[Published],
    constants: Mapping[str, Any],
    without: str = "",
) -> Ranges:
    """From the residuals of all publishers but `without`, which has no part in any of them: each is
    predicted by constants fitted without it and without `without`."""
    results: dict[str, list[Residual]] = {part: [] for part in PARTS}
    for name, own in by_publisher(rules, runs).items():
        if name == without:
            continue
        names = sorted({name, without} - {""})
        chosen = settings(own, model.most_settings)
        rows = scored(model, rules, [run for run, _ in chosen], constants["+".join(names)], names)
        for row, (_, weight) in zip(rows, chosen, strict=True):
            for part in PARTS:
                true, predicted = row.measured(part), row.predicted(part)
                if true is not None and predicted is not None:
                    results[part].append(Residual(row.kind, true / predicted.value, weight))
    return {part: ranges(rows) for part, rows in results.items()}


def ranges(residuals: Sequence[Residual]) -> dict[str, tuple[float, float]]:
    """The 5 % and 95 % quantiles of each kind of stack with enough residuals, and of all."""
    counts = Counter(one.kind for one in residuals)
    results = {
        kind: [one for one in residuals if one.kind == kind]
        for kind, count in sorted(counts.items())
        if count >= LEAST_RESIDUALS
    }
    return {
        kind: (_quantile(some, TAIL), _quantile(some, 1 - TAIL))
        for kind, some in {"": list(residuals), **results}.items()
        if some
    }


def scored(
    model: Model,
    rules: Rules,
    runs: Sequence[Published],
    constants: Any,
    without: Sequence[str] = (),
) -> list[Scored]:
    """Predictions with their own ranges; what files of `without` decided is not used to read."""
    reading = reading_without(rules, without)
    return [_scored(model, rules, run, constants, reading) for run in runs]


def left_out(
    model: Model,
    rules: Rules,
    runs: Sequence[Published],
    constants: Mapping[str, Any],
    spans: Mapping[str, Ranges],
) -> list[Scored]:
    """Each publisher by the constants and in the ranges that it had no part in."""
    return [
        _in_ranges(row, spans[name])
        for name, own in by_publisher(rules, runs).items()
        for row in scored(model, rules, own, constants[name], [name])
    ]


def unseen(rules: Rules, rows: Sequence[Scored]) -> list[Scored]:
    """Those whose rules were all chosen without a file of their publisher."""
    return [row for row in rows if rules.unseen(row.run.file, row.stack)]


def reading_without(rules: Rules, names: Sequence[str]) -> Reading:
    """Of memory figures, without the files of the publishers `names`."""
    files = [file for name in names for file in rules.publishers[name]]
    return partial(rules.read, without=files)


def _scored(
    model: Model,
    rules: Rules,
    run: Published,
    constants: Any,
    reading: Reading,
) -> Scored:
    predicted, (stack, is_guess) = model.predict(run.row, constants), model.stack(run.row)
    seconds, peak = predicted.predicted_step_time_s, predicted.predicted_peak_mem_gib
    time = memory = None
    if seconds is not None:
        time = Interval(seconds, predicted.time_low_s or 0.0, predicted.time_high_s or 0.0)
    if peak is not None:
        value = model.peak_gib(run, predicted, constants, reading)
        assert value is not None
        low, high = predicted.mem_low_gib or 0.0, predicted.mem_high_gib or 0.0
        memory = Interval(value, value, value).scaled(low / peak, high / peak)
    reason = "" if time or memory else predicted.note.split(";")[0]
    kind = "generic" if is_guess else rules.ranges_kind(stack)
    return Scored(run, stack, kind, time, memory, predicted.predicted_fits, reason)


def _in_ranges(row: Scored, spans: Ranges) -> Scored:
    results = {}
    for part in PARTS:
        own, span = row.predicted(part), spans[part].get(row.kind, spans[part].get(""))
        results[part] = own.scaled(*span) if own is not None and span is not None else own
    return replace(row, time=results["time"], memory=results["memory"])


def _quantile(known: Sequence[Residual], share: float) -> float:
    """The ratio that `share` of the weight lies below."""
    ordered = sorted(known, key=lambda one: one.ratio)
    wanted, passed = share * sum(one.weight for one in ordered), 0.0
    for one in ordered:
        passed += one.weight
        if passed >= wanted:
            break
    # As many digits as are published.
    return float(f"{one.ratio:.4g}")
