"""The fitted constants of time, from published runs: `python -m tests.scorecard.fit`.

Coordinate descent on the mean absolute logarithm of predicted over measured. Every file weighs as
the square root of its rows, so that no table dominates; the same data gives the same constants.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import exp, log, sqrt

from advisor.predict.basis import Basis, basis_of
from advisor.predict.constants import CONSTANTS, Constants
from advisor.predict.convnet_step import layered
from advisor.predict.ranges import situation_of
from advisor.predict.resolve import resolve
from advisor.predict.setup import Setup
from advisor.predict.time import step_time
from tests.scorecard.published import WEIGHTS, Published, published

# Where a constant may go: shares are at most 1, and nothing is without effect.
BOUNDS = {"launch_s": (1e-6, 1e-3), "scan_bytes": (10.0, 1000.0)}
DEFAULT_BOUNDS = (0.05, 1.0)
# A share of an efficiency times the published best rate may exceed 1 a little.
WIDE = frozenset({"sustained", "limited", "expert"})


# Every fit starts here, so that nothing of a source that is left out lingers in it.
START = Constants(
    sustained=0.9,
    limited=0.9,
    memory=0.8,
    scan_bytes=100.0,
    flash=0.38,
    unaligned=0.7,
    expert=0.6,
    overlap=0.6,
    inside=0.8,
    shared=0.4,
    launch_s=5e-5,
)
# What a constant is believed to be before any run is seen, and how much a run on the other side of
# it weighs: no more than keeping constants in place that the runs at hand say nothing of. Devices
# sustain nine tenths of the best rate published for them; a scan passes over its elements a dozen
# times in fp32, forward.
PRIORS = {
    **dict.fromkeys(("sustained", "limited"), 0.9),
    "scan_bytes": 100.0,
    "expert": 0.6,
    "flash": 0.38,
}
PRIOR_WEIGHT = 0.01
# A run that takes twice as long as predicted spends its time on what its row does not say (its
# data, another job): by how much it misses says nothing of the constants.
UNEXPLAINED = log(2)


@dataclass(frozen=True, slots=True)
class Timed:
    """A published run that has a step time, ready to be predicted."""

    run: Published
    setup: Setup
    basis: Basis
    step_s: float
    weight: float


def timed_runs(runs: Sequence[Published]) -> list[Timed]:
    """The transformers among `runs` that have a measured time."""
    found = []
    for run in runs:
        setup = resolve(run.row)
        if run.step_s is None or not isinstance(setup, Setup) or layered(setup) is not None:
            continue
        found.append(Timed(run, setup, basis_of(setup), run.step_s, WEIGHTS[run.reliability]))
    sizes = Counter[str]()
    for timed in found:
        sizes[timed.run.file] += timed.weight  # type: ignore[assignment]
    return [
        replace(timed, weight=timed.weight / sqrt(sizes[timed.run.file]))
        for timed in found
        if timed.weight
    ]


def loss(constants: Constants, runs: Sequence[Timed]) -> float:
    """Weighted mean of |log(predicted / measured)|."""
    total = sum(timed.weight for timed in runs)
    return (
        sum(
            timed.weight
            * min(UNEXPLAINED, abs(log(step_time(timed.basis, constants).step_s / timed.step_s)))
            for timed in runs
        )
        / total
    )


def fit(runs: Sequence[Timed], start: Constants = START, *, rounds: int = 40) -> Constants:
    """The constants of least loss that steps find, along one constant at a time.

    Beside the loss, a weak prior holds what these runs do not determine. Steps shrink when a round
    gains little, and grow along a direction that goes on gaining.
    """

    def cost(constants: Constants) -> float:
        held = sum(log(getattr(constants, name) / prior) ** 2 for name, prior in PRIORS.items())
        return loss(constants, runs) + PRIOR_WEIGHT * held

    best, least = start, cost(start)
    names = [constant.name for constant in fields(Constants)]
    steps = dict.fromkeys(names, 0.2)
    for _ in range(rounds):
        before = best
        for name in names:
            for sign in (1, -1):
                value = _bounded(name, getattr(best, name) * exp(sign * steps[name]))
                tried = replace(best, **{name: value})
                found = cost(tried) if value != getattr(best, name) else least
                if found < least:
                    best, least = tried, found
                    steps[name] = min(0.5, steps[name] * 1.5)
                    break
            else:
                steps[name] /= 2
        # Once more as far as the round went: along a valley no single constant leads on.
        onward = {n: _bounded(n, getattr(best, n) ** 2 / getattr(before, n)) for n in names}
        further = replace(best, **onward)
        if (found := cost(further)) < least:
            best, least = further, found
        if max(steps.values()) < 0.004:
            steps = dict.fromkeys(names, 0.1)
    return best


def _bounded(name: str, value: float) -> float:
    low, high = BOUNDS.get(name, DEFAULT_BOUNDS)
    return min(max(value, low), 1.3 if name in WIDE else high)


def left_out(runs: Sequence[Timed], *, rounds: int = 30) -> dict[str, Constants]:
    """The constants fitted without each file, by its name."""
    files = sorted({timed.run.file for timed in runs})
    return {
        file: fit([timed for timed in runs if timed.run.file != file], rounds=rounds)
        for file in files
    }


def ranges(runs: Sequence[Timed], without: dict[str, Constants]) -> dict[str, tuple[float, float]]:
    """By situation, the 5 % and 95 % quantiles of measured over predicted, each file left out."""
    ratios: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for timed in runs:
        time = step_time(timed.basis, without[timed.run.file])
        situation = situation_of(timed.setup, host_share=time.host_s / time.step_s)
        ratios[situation].append((timed.step_s / time.step_s, timed.weight))
    return {
        situation: (_quantile(found, 0.05), _quantile(found, 0.95))
        for situation, found in sorted(ratios.items())
    }


def _quantile(values: list[tuple[float, float]], share: float) -> float:
    """The value that `share` of the weight lies below."""
    ordered = sorted(values)
    wanted, passed = share * sum(weight for _, weight in ordered), 0.0
    for value, weight in ordered:
        passed += weight
        if passed >= wanted:
            return value
    return ordered[-1][0]


def main() -> int:
    runs = timed_runs(published())
    best = fit(runs)
    write = sys.stdout.write
    write(f"loss {loss(CONSTANTS, runs):.4f} -> {loss(best, runs):.4f}\n")
    for constant in fields(Constants):
        write(f"    {constant.name}: float = {getattr(best, constant.name):.3g}\n")
    write("measured over predicted, each file left out, 5 % and 95 %\n")
    for situation, (low, high) in ranges(runs, left_out(runs)).items():
        write(f'    "{situation}": ({low:.2f}, {high:.2f}),\n')
    return 0


if __name__ == "__main__":
    sys.exit(main())
