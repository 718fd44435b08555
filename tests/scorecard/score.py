"""Figures of merit: how far predictions are from what was measured, and how well they choose."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from statistics import fmean, median

from advisor.predict.prediction import Prediction
from tests.scorecard.published import Published

# A group of layouts says something about ranking from this many on.
LEAST_LAYOUTS = 3


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
    """How well layouts are ranked, over groups of one model, sequence and number of devices.

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
    """Out of memory: of those that failed how many were told, and of those told how many failed."""

    rows: int
    recall: float | None
    precision: float | None


Pair = tuple[Published, Prediction]


def time_errors(pairs: Iterable[Pair]) -> Errors | None:
    """Of the step time."""
    return _errors(
        (run.row.row_id, run.step_s, p.predicted_step_time_s, p.time_low_s, p.time_high_s)
        for run, p in pairs
    )


def memory_errors(pairs: Iterable[Pair]) -> Errors | None:
    """Of the peak, against the counter that the row names: allocated, or what the card shows."""
    found = []
    for run, p in pairs:
        if run.oom or p.predicted_peak_mem_gib is None or p.predicted_reserved_gib is None:
            continue
        allocated = "alloc" in run.memory_metric
        value = p.predicted_peak_mem_gib if allocated else p.predicted_reserved_gib
        scale = value / p.predicted_peak_mem_gib
        assert p.mem_low_gib is not None
        assert p.mem_high_gib is not None
        low, high = p.mem_low_gib * scale, p.mem_high_gib * scale
        found.append((run.row.row_id, run.memory_gib, value, low, high))
    return _errors(found)


def failures(pairs: Iterable[Pair]) -> Failures:
    """Of the rows that say whether they ran."""
    known = [(run.oom, not p.predicted_fits) for run, p in pairs
             if run.oom is not None and p.predicted_fits is not None]  # fmt: skip
    failed = sum(oom for oom, _ in known)
    told = sum(said for _, said in known)
    right = sum(oom and said for oom, said in known)
    return Failures(
        rows=len(known),
        recall=right / failed if failed else None,
        precision=right / told if told else None,
    )


def choice(pairs: Iterable[Pair]) -> Choice | None:
    """Within groups of (source, model, sequence, devices, samples a step) that differ in layout."""
    groups: dict[tuple[object, ...], list[Pair]] = defaultdict(list)
    for run, p in pairs:
        row = run.row
        key = (row.source, row.model_name, row.n_layers, row.hidden, row.n_heads, row.seq_len,
               row.gpu_type, row.n_gpus, row.dtype, row.global_batch)  # fmt: skip
        groups[key].append((run, p))
    correlations, regrets, failed = [], [], 0
    for group in groups.values():
        told = [
            (run, p)
            for run, p in group
            if p.predicted_step_time_s is not None and (run.step_s is not None or run.oom)
        ]
        # Runs of one layout, on other days or with other releases, are one: their median.
        times: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
        for run, p in told:
            if run.step_s is not None:
                times[_layout(run)].append((p.predicted_step_time_s or 0.0, run.step_s))
        if len(times) < LEAST_LAYOUTS:
            continue
        measured = {layout: median(m for _, m in found) for layout, found in times.items()}
        predicted = {layout: median(p for p, _ in found) for layout, found in times.items()}
        correlations.append(_spearman(list(predicted.values()), list(measured.values())))
        fitting = [(run, p) for run, p in told if p.predicted_fits] or told
        run, _ = min(fitting, key=lambda pair: pair[1].predicted_step_time_s or 0.0)
        if _layout(run) in measured:
            regrets.append(measured[_layout(run)] / min(measured.values()) - 1)
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


def card(pairs: Sequence[Pair]) -> dict[str, dict[str, object]]:
    """By file and over all: time, memory, failures and choice, of rows of high reliability.

    What runs failed is told of rows of low reliability too: fewer than thirty say that they did.
    """
    groups: dict[str, list[Pair]] = defaultdict(list)
    for run, p in pairs:
        groups[run.file].append((run, p))
        groups["all"].append((run, p))
    return {name: _scores(group) for name, group in sorted(groups.items())}


def _scores(pairs: Sequence[Pair]) -> dict[str, object]:
    high = [pair for pair in pairs if pair[0].reliability == "high"]
    some = [pair for pair in pairs if pair[0].reliability != "low"]
    parts: Mapping[str, tuple[Callable[[Sequence[Pair]], object], Sequence[Pair]]] = {
        "time": (time_errors, high),
        "time, medium too": (time_errors, some),
        "memory": (memory_errors, high),
        "memory, medium too": (memory_errors, some),
        "failures": (failures, high),
        "failures, medium too": (failures, some),
        "failures, low too": (failures, pairs),
        "choice": (choice, some),
    }
    found: dict[str, object] = {}
    for name, (score, rows) in parts.items():
        result = score(rows)
        found[name] = None if result is None else _rounded(asdict(result))  # type: ignore[call-overload]
    return found


def _errors(
    rows: Iterable[tuple[str, float | None, float | None, float | None, float | None]],
) -> Errors | None:
    found = []
    for name, true, told, low, high in rows:
        if true is None or told is None or low is None or high is None:
            continue
        found.append(
            (abs(told / true - 1), name, log(told / true), low <= true <= high, true > high)
        )
    if not found:
        return None
    found.sort()
    return Errors(
        rows=len(found),
        median=median(error for error, *_ in found),
        p90=found[min(len(found) - 1, int(0.9 * len(found)))][0],
        worst=found[-1][0],
        worst_row=found[-1][1],
        bias=exp(median(ratio for _, _, ratio, _, _ in found)) - 1,
        covered=fmean(inside for *_, inside, _ in found),
        beyond=fmean(above for *_, above in found),
    )


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
