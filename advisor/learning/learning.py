"""Learning from runs: the constants of a device as its own steps say they are.

A step is homogeneous in the times that it rests on: where all of them are a tenth longer, it is. So
its derivatives by them add up to the step (Euler) and cut it into parts: the part of a constant is
what grows with it. A run is then explained by

    measured = rest + sum over constants of part * exp(change)

with changes as small as the doubt in the constants allows. The fit is least squares in logarithms,
each run weighing what its own scatter lets it; one that is far from the others pulls no harder than
one at the edge of its range (Huber), so that an odd run does not spoil the rest.

What else a machine does makes steps longer and never shorter. So of a run it is the fast quartile
of its steps that counts, and of equal runs the one that a quarter were faster than: runs under load
do not make an idle machine look slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, fsum, log, sqrt
from statistics import median

import numpy as np
from numpy.typing import NDArray

from advisor.cost import estimate
from advisor.cost.compute.unit_times import COMPUTE_ERROR
from advisor.inputs.facts import Facts
from advisor.learning.constants import (
    WIDEST_ERROR,
    as_measured,
    doubts,
    measured,
    own_errors,
    slowed,
    unit_times,
)
from engines.plan import Plan
from profiles.machine.cluster import ClusterProfile, Constant, Learned
from profiles.timing.runs import ConstantShare, TrainingRun

# Scatter of different models' optimal constants, besides their own measurement error. Small GPTs by
# constants fitted to the others' steps, on a shared CPU: medians of 0.10, 0.12 and 0.19 (python -m
# tests.benchmarks.learning).
RUN_ERROR = COMPUTE_ERROR
# Of the doubt in a process's context, what differs from process to process: assumed, half of it.
OWN_SHARE = 1 / 2
LEAST_CONTEXT_ERROR = 0.02  # allocators keep some pages more or less
# Beyond so many of its standard deviations a run pulls no harder: 95 % as efficient as least
# squares where no run is odd (Huber 1981, Robust Statistics).
HUBER = 1.345
# Errors are ranges of 90 %: so many standard deviations of a normal distribution.
COVERAGE = 1.645
# A constant is called measured where this share of a run's step rests on it.
TOLD_SHARE = 0.1
# From the 10th percentile of a run's steps, which its timing has, to the median: where the 25th is.
QUARTILE = (25 - 10) / (50 - 10)
# By how much a constant is made slower to see what rests on it: little, as for a derivative.
NUDGE = 1e-3
MOST_ROUNDS = 100
CONVERGED = 1e-9

_Array = NDArray[np.float64]


def parts_of(plan: Plan, facts: Facts) -> dict[Constant, ConstantShare]:
    """Seconds of the predicted step that depend on each constant."""
    whole = estimate(plan, facts).step_s
    parts = {}
    for constant, unit_s in unit_times(facts.cluster, facts.precision.dtype).items():
        slower = slowed(facts.cluster, {constant: 1 + NUDGE})
        nudged = facts.rebuilt(cluster=slower)
        seconds = max(0.0, (estimate(plan, nudged).step_s - whole) / NUDGE)
        parts[constant] = ConstantShare(seconds=seconds, unit_s=unit_s)
    return parts


def refit(cluster: ClusterProfile, runs: Sequence[TrainingRun], *, dtype: str) -> ClusterProfile:
    """Return `cluster` with constants and errors fitted to `runs`; unchanged without runs.

    Args:
        runs: of this kind of machine (see `profiles.timing.runs.runs_on`). Those in another
            dtype than `dtype` are left out: what one reaches of its peak says little of another.
    """
    runs = [run for run in runs if run.dtype == dtype]
    if not runs or cluster.learned is not None:
        return cluster
    return _with_context(_with_times(cluster, runs, dtype), runs)


def _with_times(cluster: ClusterProfile, runs: Sequence[TrainingRun], dtype: str) -> ClusterProfile:
    units = unit_times(cluster, dtype)
    seen = _one_of_equals((run, log(undisturbed_s(run) / _today_s(run, units))) for run in runs)
    parts = np.array(
        [[_part_s(run, c, units) / _today_s(run, units) for c in units] for run, _ in seen]
    )
    rest = np.maximum(0.0, 1 - parts.sum(axis=1))
    spreads = [run.step.relative_error for run, _ in seen]
    prior = doubts(cluster, list(units), dtype)

    def explain(change: _Array) -> tuple[_Array, _Array]:
        changed = parts * np.exp(change)
        step = rest + changed.sum(axis=1)
        return np.log(step), changed / step[:, None]

    missed = np.array([missed for _, missed in seen])
    fit = _fit(explain, missed, errors=np.hypot(RUN_ERROR, spreads), prior=prior)
    scatter = max(fit.scatter, median(spreads))
    known = own_errors(cluster, dtype)
    left = np.sqrt(np.diag(fit.covariance)).tolist()
    errors = {
        constant: max(scatter, min(known[constant], error))
        for constant, error, share in zip(units, left, parts.max(axis=0), strict=True)
        if share >= TOLD_SHARE
    }
    changes = {c: exp(change) for c, change in zip(units, fit.change.tolist(), strict=True)}
    fitted = as_measured(slowed(cluster, changes), errors, dtype, origin=_origin(len(runs)))
    learned = Learned(runs=dict.fromkeys(errors, len(runs)))
    return fitted.model_copy(update={"learned": learned})


def _with_context(cluster: ClusterProfile, runs: Sequence[TrainingRun]) -> ClusterProfile:
    """Correct the context, memory of a process before its first tensor, by the runs' peaks."""
    context = cluster.device.context_bytes
    known = [(run, run.peak) for run in runs if run.peak is not None]
    if not known or context.value <= 0:
        return cluster
    seen = _one_of_equals((run, peak.missed_bytes / context.value) for run, peak in known)
    doubt = max(LEAST_CONTEXT_ERROR, context.relative_error)
    errors = [(run.peak.doubt_bytes if run.peak else 0.0) / context.value for run, _ in seen]

    def explain(change: _Array) -> tuple[_Array, _Array]:
        return np.repeat(change, len(seen)), np.ones((len(seen), 1))

    missed = np.array([missed for _, missed in seen])
    prior = np.array([[doubt**2]])
    fit = _fit(explain, missed, errors=np.hypot(OWN_SHARE * doubt, errors), prior=prior)
    change = max(float(fit.change[0]), -WIDEST_ERROR)
    error = max(fit.scatter, OWN_SHARE * doubt, sqrt(fit.covariance[0, 0])) / (1 + change)
    corrected = measured(context, error, origin=_origin(len(known)))
    corrected = corrected.model_copy(update={"value": context.value * (1 + change)})
    offset_bytes = context.value * change
    learned = (cluster.learned or Learned()).model_copy(
        update={"context_runs": len(known), "context_offset_bytes": offset_bytes}
    )
    device = cluster.device.model_copy(update={"context_bytes": corrected})
    return cluster.model_copy(update={"device": device, "learned": learned})


@dataclass(frozen=True, slots=True)
class _Fit:
    """Solution of a least-squares fit.

    Attributes:
        change: of each unknown.
        covariance: of the changes, as squares of errors.
        scatter: error of one measurement, by what is left unexplained of several; 0 where there is
            one, of which nobody knows whether it or the prior is odd.
    """

    change: _Array
    covariance: _Array
    scatter: float


def _fit(
    explain: Callable[[_Array], tuple[_Array, _Array]],
    wanted: _Array,
    *,
    errors: _Array,
    prior: _Array,
) -> _Fit:
    """Least squares by Gauss and Newton, with Huber's weights.

    Args:
        explain: from changes to what they make of `wanted`, and its derivatives (runs x unknowns).
        wanted: what was measured, one a run.
        errors: of each measurement.
        prior: covariance of the changes, as squares of errors, when nothing was measured.
    """
    prior_weight = np.linalg.inv(prior) * COVERAGE**2
    deviations = errors / COVERAGE
    change = np.zeros(len(prior))
    for _ in range(MOST_ROUNDS):
        predicted, slopes = explain(change)
        residuals = wanted - predicted
        reach = HUBER * deviations / np.maximum(np.abs(residuals), HUBER * deviations)
        weights = reach / deviations**2
        curvature = prior_weight + slopes.T @ (weights[:, None] * slopes)
        pull = slopes.T @ (weights * residuals) - prior_weight @ change
        # In logarithms: no further than a factor of e at once.
        step = np.clip(np.linalg.solve(curvature, pull), -1.0, 1.0)
        change = change + step
        if np.abs(step).max() < CONVERGED:
            break
    squares = float((reach * (wanted - explain(change)[0]) ** 2).sum() / reach.sum())
    return _Fit(
        change=change,
        covariance=np.asarray(np.linalg.inv(curvature) * COVERAGE**2, dtype=np.float64),
        scatter=COVERAGE * sqrt(squares) if len(wanted) > 1 else 0.0,
    )


def _one_of_equals(runs: Iterable[tuple[TrainingRun, float]]) -> list[tuple[TrainingRun, float]]:
    """Keep one run per model and plan, whose errors are correlated: the lower quartile, of few the
    least."""
    groups: dict[tuple[str, str], list[tuple[TrainingRun, float]]] = {}
    for run, missed in runs:
        groups.setdefault((run.fingerprint, run.plan), []).append((run, missed))
    return [
        sorted(group, key=lambda pair: pair[1])[(len(group) - 1) // 4] for group in groups.values()
    ]


def undisturbed_s(run: TrainingRun) -> float:
    """Step of `run` without disturbance by other programs or its slow ranks: the fast quartile."""
    step = run.step
    return run.even_share * (step.low_s + QUARTILE * (step.median_s - step.low_s))


def _part_s(run: TrainingRun, constant: Constant, units: Mapping[Constant, float]) -> float:
    """Seconds of a part of the run's step under the current constants."""
    part = run.parts.get(constant)
    return part.seconds * units[constant] / part.unit_s if part else 0.0


def _today_s(run: TrainingRun, units: Mapping[Constant, float]) -> float:
    """Predict the run's step with the current constants."""
    rest = run.predicted_s - fsum(run.parts[c].seconds for c in units if c in run.parts)
    return max(0.0, rest) + fsum(_part_s(run, constant, units) for constant in units)


def _origin(count: int) -> str:
    return f"refitted from {count} run{'s' if count > 1 else ''}"
