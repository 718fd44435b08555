"""The fitted constants of memory, from published runs: `python -m tests.scorecard.memory_fit`.

What a device holds beyond what an allocator counts is fitted on what nvidia-smi showed, the ranges
on how predictions missed files they were not fitted on. Every file weighs as the square root of its
rows; the same data gives the same constants.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, permutations
from math import exp, log, sqrt

from advisor.predict.memory import MemoryPrediction, predict_memory, stage_memory
from advisor.predict.memory_constants import FITTED, GIB, MemoryConstants
from advisor.predict.prediction import Prediction
from advisor.predict.resolve import resolve
from advisor.predict.setup import Setup
from tests.scorecard.published import WEIGHTS, Published, published

# Where a constant may go.
BOUNDS = {
    "slack_share": (0.02, 0.4),
    "context_bytes": (0.3 * GIB, 2.0 * GIB),
    "group_bytes": (0.05 * GIB, 1.0 * GIB),
}
# Where the search begins, whatever was fitted before: a tenth, a context of today, one buffer.
START = MemoryConstants(slack_share=0.1, context_bytes=GIB, group_bytes=0.25 * GIB)
# Nine of ten between the ends.
TAIL = 0.05
_ONES = dict.fromkeys(("dense_low", "dense_high", "experts_low", "experts_high"), 1.0)


@dataclass(frozen=True, slots=True)
class Held:
    """A published run that says something of memory, ready to be predicted."""

    run: Published
    setup: Setup
    weight: float

    @property
    def of_allocator(self) -> bool:
        return counts_allocated(self.run.memory_metric)

    @property
    def has_experts(self) -> bool:
        return self.setup.shape is not None and self.setup.shape.experts > 0

    @property
    def measured_bytes(self) -> float | None:
        """Of a run that ended; the peak of one that failed is where it failed."""
        gib = self.run.memory_gib
        return None if gib is None or self.run.oom else gib * GIB


def held_runs(runs: Sequence[Published]) -> list[Held]:
    """The transformers among `runs` with a measured memory, or that ran or failed for memory."""
    found = []
    for run in runs:
        setup = resolve(run.row)
        if not isinstance(setup, Setup) or setup.shape is None or not WEIGHTS[run.reliability]:
            continue
        if run.memory_gib is None and run.oom is None and run.step_s is None:
            continue
        found.append(Held(run, setup, WEIGHTS[run.reliability]))
    sizes: Counter[str] = Counter()
    for held in found:
        if held.measured_bytes is not None:
            sizes[held.run.file] += 1
    return [replace(held, weight=held.weight / sqrt(sizes[held.run.file] or 1)) for held in found]


def counts_allocated(metric: str) -> bool:
    """Whether a published figure is the allocator's; nvidia-smi's where it does not say."""
    return "allocated" in metric or "rank-0 peak" in metric


def counted(held: Held, predicted: MemoryPrediction, constants: MemoryConstants = FITTED) -> float:
    """The predicted bytes that a published figure counts: by its counter and its rank."""
    metric, last = held.run.memory_metric, held.setup.layout.pp - 1
    if "last rank" in metric:
        return next(stage.allocated for stage in predicted.stages if stage.index == last)
    if counts_allocated(metric):
        return next(stage.allocated for stage in predicted.stages if stage.index == 0)
    if "without embedding" in metric:
        return stage_memory(held.setup, (last + 1) // 2, constants).reserved
    if "max over" in metric or not metric.startswith("nvidia-smi"):
        return predicted.reserved.value
    # Who prints what it showed, and not where, looked at the first node. BigScience's pipelines on
    # V100 showed 10 GB with one sample, 15 with eight, and failed at 32 with sixteen: another rank.
    return next(stage.reserved for stage in predicted.stages if stage.index == 0)


def ratio(held: Held, constants: MemoryConstants) -> float:
    """Measured over predicted."""
    assert held.measured_bytes is not None
    predicted = predict_memory(held.setup, constants)
    return held.measured_bytes / counted(held, predicted, constants)


def ends(held: Held, constants: MemoryConstants) -> tuple[float, float]:
    """Ends of the range over the predicted value, of either counter."""
    found = predict_memory(held.setup, constants).allocated
    return found.low / found.value, found.high / found.value


def as_published(
    run: Published, prediction: Prediction, constants: MemoryConstants = FITTED
) -> Prediction:
    """The prediction with the memory that the run's figure counts, by its counter and its rank.

    What is published of one rank says nothing of a fuller one. Both figures become that one, so
    that whoever compares need not know which is meant; so does the range.
    """
    setup = resolve(run.row)
    if not isinstance(setup, Setup) or setup.shape is None:
        return prediction
    held = Held(run, setup, 1.0)
    predicted = predict_memory(setup, constants)
    gib = counted(held, predicted, constants) / GIB
    low, high = ends(held, constants)
    return replace(
        prediction,
        predicted_peak_mem_gib=gib,
        predicted_reserved_gib=gib,
        mem_low_gib=gib * low,
        mem_high_gib=gib * high,
        predicted_fits=predicted.fits,
    )


def loss(constants: MemoryConstants, runs: Sequence[Held]) -> float:
    """Weighted mean of |log(measured / predicted)|."""
    total = sum(held.weight for held in runs)
    return sum(held.weight * abs(log(ratio(held, constants))) for held in runs) / (total or 1.0)


def fit(runs: Sequence[Held], start: MemoryConstants = START) -> MemoryConstants:
    """The constants that published figures of `runs` want; the range's ends are left as they are.

    What allocators counted is predicted without constants, so only the device's figures count.
    """
    device = [held for held in runs if held.measured_bytes is not None and not held.of_allocator]
    return _descend(start, lambda constants: loss(constants, device)) if device else start


def fit_range(
    left: Sequence[tuple[Held, MemoryConstants]], *, experts: bool
) -> tuple[float, float]:
    """Ends over the prediction, from what constants of other files missed of each run.

    What a range allows for already, because a row does not say which kernel ran, does not count.
    Where no run is of the kind that is asked for, all runs give the ends.
    """
    own = [pair for pair in left if pair[0].has_experts == experts] or list(left)
    ratios = []
    for held, constants in own:
        missed, neutral = ratio(held, constants), replace(constants, **_ONES)
        allowed = ends(held, neutral)[1]
        ratios.append((min(missed, max(1.0, missed / allowed)), held.weight))
    ratios.sort()
    sums = list(accumulate(weight for _, weight in ratios))
    low = bisect_left(sums, TAIL * sums[-1])
    high = bisect_left(sums, (1 - TAIL) * sums[-1])
    return ratios[low][0], ratios[min(high, len(ratios) - 1)][0]


def with_ranges(
    constants: MemoryConstants, left: Sequence[tuple[Held, MemoryConstants]]
) -> MemoryConstants:
    """`constants` with both ranges from the misses on runs that were left out."""
    dense, experts = (fit_range(left, experts=kind) for kind in (False, True))
    return replace(
        constants,
        dense_low=dense[0],
        dense_high=dense[1],
        experts_low=experts[0],
        experts_high=experts[1],
    )


def left_out(runs: Sequence[Held]) -> list[tuple[Held, MemoryConstants]]:
    """Each run with the constants, ends of the range included, that all other files gave."""
    files = sorted({held.run.file for held in runs})
    showing = {held.run.file for held in runs if held.measured_bytes and not held.of_allocator}
    whole = fit(runs)
    # A file that shows nothing of the device takes no part in that fit.
    without = {
        file: fit([held for held in runs if held.run.file != file]) if file in showing else whole
        for file in files
    }
    missed = [(held, without[held.run.file]) for held in runs if held.measured_bytes is not None]
    found: list[tuple[Held, MemoryConstants]] = []
    for file in files:
        elsewhere = [pair for pair in missed if pair[0].run.file != file]
        constants = with_ranges(without[file], elsewhere)
        found += [(held, constants) for held in runs if held.run.file == file]
    return found


def _descend(
    start: MemoryConstants, loss_of: Callable[[MemoryConstants], float]
) -> MemoryConstants:
    """Steps along one constant, or one up and another down; smaller ones where none gains."""
    best, least, step = start, loss_of(start), 0.4
    moves = [{name: sign} for name in BOUNDS for sign in (1, -1)]
    moves += [{up: 1, down: -1} for up, down in permutations(BOUNDS, 2)]
    while step > 0.01:
        gained = False
        for move in moves:
            tried = replace(best, **{name: _moved(best, name, sign * step)
                                     for name, sign in move.items()})  # fmt: skip
            found = loss_of(tried)
            if found < least - 1e-6:
                best, least, gained = tried, found, True
        step = step if gained else step / 2
    return best


def _moved(constants: MemoryConstants, name: str, step: float) -> float:
    low, high = BOUNDS[name]
    value: float = getattr(constants, name)
    return min(max(value * exp(step), low), high)


def main() -> int:
    runs = held_runs(published())
    best = fit(runs)
    left = [pair for pair in left_out(runs) if pair[0].measured_bytes is not None]
    best = with_ranges(best, left)
    for constant in fields(MemoryConstants):
        value = getattr(best, constant.name)
        shown = f"{value / GIB:.3g} * GIB" if constant.name.endswith("bytes") else f"{value:.3g}"
        sys.stdout.write(f"    {constant.name}: float = {shown}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
