"""Fit: the constants that published runs and what was believed before them make most likely.

Errors are ln(predicted / measured), of time and of memory; large ones are common (a run may have
waited for its data), so they count by size, not by square (Laplace), beside lognormal priors.
Gauss-Newton steps: a Jacobian by differences at the priors, which fits to other runs share, then
Broyden's updates; the linearised problem solved by reweighted least squares, as much of the step
taken as lowers the loss. The same data gives the same constants.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from profiles.errors import UnknownNameError
from tests.scorecard.model import Model, Reading, with_values
from tests.scorecard.published import WEIGHTS, Published
from tests.scorecard.rules import Prior

Array = npt.NDArray[np.float64]

# Mean size of an error that no constant explains, in ln: published runs of one setting on other
# days differ by 5 to 15 % (see the notes in their tables).
NOISE = 0.15
# Settings of one file that take part, unless the model says: more cost time.
MOST_SETTINGS = 40
ROUNDS = 10
DIFFERENCE = 0.02
# A factor e in any constant is as far as one linearisation is trusted.
LONGEST_STEP = 1.0


def fit(
    model: Model, runs: Sequence[Published], priors: Mapping[str, Prior], reading: Reading
) -> Any:
    """`model.calibration` with every constant that has a prior as `runs` want it.

    Starts at the priors, so that nothing of a run that is left out lingers in it.

    Raises:
        UnknownNameError: a prior of what is not a constant.
    """
    names = [name for name, prior in priors.items() if prior.is_fitted]
    constants = type(model.calibration).model_fields
    for name in priors:
        if name not in constants:
            raise UnknownNameError("constant", name, constants, where="rules.toml")
    start = with_values(model.calibration, {name: one.prior for name, one in priors.items()})
    chosen = settings(runs, model.most_settings)
    if not chosen or not names:
        return start
    center = np.log([priors[name].prior for name in names])
    tight = np.array([1 / log(priors[name].factor) ** 2 for name in names])
    most = np.log([priors[name].most or np.inf for name in names])
    weights = np.repeat([weight for _, weight in chosen], 2)

    def constants_at(x: Array) -> Any:
        return with_values(start, dict(zip(names, np.exp(x).tolist(), strict=True)))

    def misses(x: Array) -> Array:
        return np.concatenate([_misses(model, run, constants_at(x), reading) for run, _ in chosen])

    known = np.isfinite(misses(center))
    weights = weights[known] / NOISE

    def loss(x: Array, missed: Array) -> float:
        total = weights @ np.abs(missed) + tight @ (x - center) ** 2 / 2
        return float(total) if np.isfinite(total) else float("inf")

    x: Array = center
    missed = misses(center)[known]
    steps = DIFFERENCE * np.eye(len(x))
    slopes = np.stack([misses(x + step)[known] - missed for step in steps], 1) / DIFFERENCE
    slopes = np.nan_to_num(slopes)
    for _ in range(ROUNDS):
        wanted = _solve(missed, slopes, weights, tight, x - center)
        before, least = x, loss(x, missed)
        for share in (1.0, 0.5, 0.25, 0.1):
            tried: Array = np.minimum(
                x + share * np.clip(wanted, -LONGEST_STEP, LONGEST_STEP), most
            )
            then, step = misses(tried)[known], tried - before
            if not step.any() or not np.isfinite(then).all():
                continue
            # What the linearisation missed along this step corrects it, taken or not.
            slopes = slopes + np.outer(then - missed - slopes @ step, step / (step @ step))
            if loss(tried, then) < least:
                x, missed = tried, then
                break
        if loss(x, missed) > least * (1 - 1e-4):
            break
    # As many digits as are published.
    return with_values(start, {n: float(f"{getattr(constants_at(x), n):.6g}") for n in names})


def settings(runs: Sequence[Published], most: int = MOST_SETTINGS) -> list[tuple[Published, float]]:
    """Runs that differ in what they run, evenly from each file, with their weights."""
    files: dict[str, dict[object, Published]] = defaultdict(dict)
    for run in runs:
        if WEIGHTS[run.reliability] and (run.step_s or (run.memory_gib and not run.oom)):
            same = (replace(run.row, row_id=""), run.step_s is None, run.memory_metric)
            files[run.file].setdefault(same, run)
    results = []
    for distinct in files.values():
        every = -(-len(distinct) // most)
        chosen = list(distinct.values())[::every]
        results += [(run, WEIGHTS[run.reliability] / sqrt(len(chosen))) for run in chosen]
    return results


def _misses(model: Model, run: Published, constants: Any, reading: Reading) -> tuple[float, float]:
    """ln(predicted / measured) of time and of memory; nan where either is not known."""
    predicted = model.predict(run.row, constants)
    measured = None if run.oom else run.memory_gib
    peak = measured and model.peak_gib(run, predicted, constants, reading)
    return _ratio(predicted.predicted_step_time_s, run.step_s), _ratio(peak, measured)


def _ratio(predicted: float | None, measured: float | None) -> float:
    return log(predicted / measured) if predicted and measured else float("nan")


def _solve(missed: Array, slopes: Array, weights: Array, tight: Array, off: Array) -> Array:
    """The step of least loss where errors are linear: least squares, reweighted 100 times."""
    step = np.zeros_like(off)
    for _ in range(100):
        weighted = slopes.T * (weights / np.maximum(np.abs(missed + slopes @ step), 1e-4))
        step[:] = np.linalg.solve(
            weighted @ slopes + np.diag(tight), -(weighted @ missed + tight * off)
        )
    return step
