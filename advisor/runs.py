"""From a training to a run that is kept, and from runs that were kept to better constants."""

from __future__ import annotations

import logging
import weakref
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from advisor.decision import Decision
from advisor.learning import parts_of, refit
from profiles import runs
from profiles.errors import AdvisorError
from profiles.kept import fingerprint
from profiles.provenance import Timing
from profiles.runs import Machine, Peak, Run

if TYPE_CHECKING:
    from engines.parallel import ParallelModel
    from engines.steps import Steps
    from profiles.cluster import ClusterProfile

log = logging.getLogger(__name__)

# With fewer steps a median says little on a machine that others use too.
FEWEST_STEPS = 5
# Unasked, only a training is kept, not a trial of a few steps.
FEWEST_UNASKED = 20


def with_runs(cluster: ClusterProfile, *, dtype: str) -> ClusterProfile:
    """`cluster`, which this process is part of, as runs that were kept here correct it."""
    return refit(cluster, runs.runs_on(runs.machine_of(cluster)), dtype=dtype)


def keep_run(parallel: ParallelModel, *, peak_bytes: float | None = None) -> Run | None:
    """Keep what was predicted of `parallel`'s steps beside what they took, for the next estimate.

    `auto_parallelize` does so by itself when the training is over; call this for runs that are
    shorter, or where the peak of memory is known. Nothing is sent: rank 0 keeps what it saw, and a
    step takes all ranks alike.

    Args:
        peak_bytes: of the fullest rank; by default what the first steps of rank 0 rose to.

    Returns:
        The run; None on the other ranks, for a plan that was not decided here, and after fewer than
        five steps beside the warm-up.
    """
    decision = parallel.decision
    if not isinstance(decision, Decision):
        return None
    steps, machine = parallel.steps, runs.machine_of(decision.facts.cluster)
    return _keep(steps, decision, machine, fewest=FEWEST_STEPS, peak_bytes=peak_bytes)


def keep_at_end(parallel: ParallelModel) -> None:
    """Keep the run when `parallel` is let go or the process ends, unless somebody did before."""
    decision = parallel.decision
    if isinstance(decision, Decision):
        machine = runs.machine_of(decision.facts.cluster)
        weakref.finalize(parallel, _keep_unasked, parallel.steps, decision, machine)


def run_of(
    decision: Decision, machine: Machine, *, step: Timing, peak_bytes: float | None = None
) -> Run:
    """What was predicted by `decision` beside what was measured."""
    facts, plan, predicted = decision.facts, decision.plan, decision.estimate
    plain = facts.model.model_copy(update={"times": ()})
    peak = None
    if peak_bytes is not None:
        context, learned = facts.cluster.device.context_bytes, facts.cluster.learned
        width = predicted.peak_high_bytes - predicted.peak_low_bytes
        peak = Peak(
            # An accelerator is measured by what its allocator reserved.
            predicted_bytes=max(predicted.reserved_bytes, predicted.peak_bytes),
            measured_bytes=peak_bytes,
            doubt_bytes=max(0.0, width - (context.high - context.low)) / 2,
            offset_bytes=learned.context_offset_bytes if learned else 0.0,
        )
    return Run(
        machine=machine,
        model=facts.model.name,
        fingerprint=fingerprint(plain.model_dump(mode="json")),
        plan=str(plan),
        dtype=facts.precision.dtype,
        predicted_s=predicted.step_s,
        parts=parts_of(plan, facts),
        step=step,
        peak=peak,
        ended_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _keep(
    steps: Steps, decision: Decision, machine: Machine, *, fewest: int, peak_bytes: float | None
) -> Run | None:
    timing = steps.timing(fewest=fewest)
    if steps.rank or timing is None:
        return None
    if peak_bytes is None and decision.plan.pp == 1:  # stages hold different things
        peak_bytes = steps.peak_bytes
    run = run_of(decision, machine, step=timing, peak_bytes=peak_bytes)
    runs.keep_run(run)
    steps.is_kept = True
    return run


def _keep_unasked(steps: Steps, decision: Decision, machine: Machine) -> None:
    """At the end of a process nothing of ours may be in the way."""
    if steps.is_kept:
        return
    try:
        _keep(steps, decision, machine, fewest=FEWEST_UNASKED, peak_bytes=None)
    except (AdvisorError, RuntimeError) as error:
        log.warning("the run is not kept: %s", error)
