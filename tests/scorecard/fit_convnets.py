"""The fitted constants of what is counted layer by layer: `python -m tests.scorecard.fit_convnets`.

Coordinate descent on the mean absolute logarithm of predicted over measured rates. Runs that differ
only in what is measured are one, and every file weighs as the square root of its runs. Also what
each file's error is with constants fitted to the others, and shares of errors for the ranges.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import exp, log, sqrt
from statistics import median, quantiles

from advisor.predict.convnet_constants import FITTED, ConvnetConstants
from advisor.predict.convnet_memory import convnet_memory
from advisor.predict.convnet_step import convnet_step, layered
from advisor.predict.resolve import resolve
from advisor.predict.setup import Setup
from tests.scorecard.published import WEIGHTS, Published, published

# Where the descent starts, always the same; constants of rows that a file does not have stay here.
# Shares of the peak as of transformers, streams at what the device's profile says, a norm's twenty
# instructions an element.
START = replace(
    FITTED,
    tensor_share=0.6,
    vector_share=0.9,
    stream_share=0.9,
    layout_passes=0.3,
    element_flop=20.0,
)
TIMED = ("tensor_share", "vector_share", "stream_share", "layout_passes", "element_flop")
# How far a constant is pulled back to its start: the loss of a factor e. Any one table leaves some
# of them open (products and streams of a single network look alike), and without this a source that
# is left out is met worse than it need be.
PULL = 0.2


@dataclass(frozen=True, slots=True)
class Timed:
    """Runs of one setup: the median of their images per second."""

    file: str
    setup: Setup
    images_per_s: float
    weight: float

    def error(self, constants: ConvnetConstants) -> float:
        """log of predicted over measured seconds."""
        step_s = convnet_step(self.setup, constants).step_s
        return log(step_s * self.images_per_s / self.setup.layout.global_batch)


def timed_runs(runs: Sequence[Published]) -> list[Timed]:
    """What is counted layer by layer among `runs` and has a measured rate."""
    rates: dict[tuple[object, ...], list[float]] = defaultdict(list)
    firsts: dict[tuple[object, ...], tuple[Published, Setup]] = {}
    for run in runs:
        setup = resolve(run.row)
        if not isinstance(setup, Setup) or layered(setup) is None:
            continue
        rate = run.samples_per_s
        if rate is None and run.step_s is not None:
            rate = setup.layout.global_batch / run.step_s
        if rate is None or not WEIGHTS[run.reliability]:
            continue
        machine = (setup.cluster.name, run.row.intra_link)
        program = (setup.software.family, setup.software.recompute)
        key = (run.file, layered(setup), machine, setup.dtype, setup.layout, program)
        rates[key].append(rate)
        firsts.setdefault(key, (run, setup))
    sizes = Counter(run.file for run, _ in firsts.values())
    return [
        Timed(run.file, setup, median(rates[key]), WEIGHTS[run.reliability] / sqrt(sizes[run.file]))
        for key, (run, setup) in firsts.items()
    ]


def loss(constants: ConvnetConstants, runs: Sequence[Timed]) -> float:
    """Weighted mean of |log(predicted / measured)|, and the pull to the start."""
    total = sum(timed.weight for timed in runs)
    missed = sum(timed.weight * abs(timed.error(constants)) for timed in runs) / total
    pulled = sum(log(getattr(constants, name) / getattr(START, name)) ** 2 for name in TIMED)
    return missed + PULL * pulled


def fit(runs: Sequence[Timed], *, rounds: int = 30) -> ConvnetConstants:
    """The time constants of least loss that steps find, along one constant at a time."""
    best, least = START, loss(START, runs)
    steps = dict.fromkeys(TIMED, 0.2)
    for _ in range(rounds):
        for name in TIMED:
            for sign in (1, -1):
                value = getattr(best, name) * exp(sign * steps[name])
                tried = replace(best, **{name: value})
                found = loss(tried, runs)
                if found < least:
                    best, least = tried, found
                    steps[name] = min(0.4, steps[name] * 1.5)
                    break
            else:
                steps[name] /= 2
        if max(steps.values()) < 0.005:
            break
    return best


def fit_cache(runs: Sequence[Published]) -> float:
    """The `cache_share` that explains the median of cards that are not full."""
    shares = []
    for run in runs:
        setup = resolve(run.row)
        if not isinstance(setup, Setup) or setup.network is None or run.memory_gib is None:
            continue
        if "smi" in run.memory_metric:
            allocated = convnet_memory(setup).allocated_bytes
            shares.append((run.memory_gib * 2**30 - FITTED.context_bytes) / allocated - 1)
    return median(shares)


def main() -> int:
    everything = published()
    runs = timed_runs(everything)
    best = replace(fit(runs), cache_share=fit_cache(everything))
    _say(f"{len(runs)} setups, loss {loss(FITTED, runs):.4f} -> {loss(best, runs):.4f}")
    for constant in fields(ConvnetConstants):
        _say(f"    {constant.name}={getattr(best, constant.name):.4g},")
    files = sorted({timed.file for timed in runs})
    for file in files:
        own = [timed for timed in runs if timed.file == file]
        other = fit([timed for timed in runs if timed.file != file])
        _tell(f"{file}, fitted to all", [timed.error(best) for timed in own])
        _tell(f"{file}, fitted to the others", [timed.error(other) for timed in own])
    return 0


def _tell(title: str, found: Sequence[float]) -> None:
    sizes = [abs(exp(one) - 1) for one in found]
    ends = quantiles(found, n=20)
    _say(
        f"{title}: median {median(sizes):.3f}, 90 % within {quantiles(sizes, n=10)[-1]:.3f};"
        f" measured over predicted 5 % {exp(-ends[-1]):.3f}, 95 % {exp(-ends[0]):.3f}"
    )


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
