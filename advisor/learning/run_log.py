"""Log of runs: record a training, and correct constants by earlier runs."""

from __future__ import annotations

import logging
import weakref
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from advisor.cost import CostModel, estimate
from advisor.cost.estimates.process_memory import process_memory
from advisor.decide.decision import Decision
from advisor.inputs.facts import Facts
from advisor.learning.anchor import Anchor, anchored, fits, kind_of
from advisor.learning.learning import parts_of, refit
from advisor.learning.residuals import StepMeasurement, anchor_of
from profiles.cache import cache_path, fingerprint, has_any, keep, recall
from profiles.errors import AdvisorError
from profiles.provenance import Timing
from profiles.timing import runs
from profiles.timing.runs import Machine, PeakRecord, TrainingRun
from profiles.timing.straggler_stats import Pace, usual

if TYPE_CHECKING:
    from engines.parallel import ParallelModel
    from engines.runtime.steps import Steps
    from profiles.machine.cluster import ClusterProfile
    from profiles.model.profile import ModelProfile

log = logging.getLogger(__name__)

# With fewer steps the median is unreliable on a shared machine.
FEWEST_STEPS = 5
# By default only a training is logged, not a trial of a few steps.
FEWEST_UNASKED = 20


def with_runs(cluster: ClusterProfile, *, dtype: str) -> ClusterProfile:
    """Return `cluster`, which contains this process, corrected by logged runs."""
    return refit(cluster, runs.runs_on(runs.machine_of(cluster)), dtype=dtype)


def keep_anchor(anchor: Anchor) -> None:
    """Store the anchor for `anchor_here`, replacing an earlier one of this model on these
    machines."""
    keep(_anchor_path(anchor.machine, anchor.kind, anchor.dtype), anchor)


def anchor_here(facts: Facts) -> Anchor | None:
    """Load the stored anchor of this model on these machines; None if there is none."""
    if not has_any("anchors"):
        return None
    path = _anchor_path(runs.machine_of(facts.cluster), kind_of(facts.model), facts.precision.dtype)
    anchor = recall(path, Anchor)
    return anchor if anchor is not None and fits(facts, anchor) else None


def with_anchor(facts: Facts, anchor: Anchor | None = None) -> Facts:
    """Return `facts`, which contain this process, corrected by `anchor` or the stored one.

    Raises:
        InputError: `anchor` is of another kind of model, device or dtype.
    """
    known = anchor or anchor_here(facts)
    return facts if known is None else anchored(facts, known)


def _anchor_path(machine: Machine, kind: str, dtype: str) -> Path | None:
    return cache_path("anchors", machine.model_dump(mode="json"), kind, dtype)


def pace_here(cluster: ClusterProfile, model: ModelProfile) -> Pace | None:
    """Scatter of ranks in logged runs: of this model if there are any, else of all."""
    known = [run for run in runs.runs_on(runs.machine_of(cluster)) if run.pace is not None]
    mine = fingerprint_of(model)
    of_model = [run for run in known if run.fingerprint == mine]
    paces = [run.pace for run in of_model or known if run.pace is not None]
    return usual(paces) if paces else None


def pace_of(
    imbalance: float | None, cluster: ClusterProfile, model: ModelProfile, *, learns: bool
) -> dict[str, float | int | None]:
    """Fields of a workload: the given imbalance, else that of logged runs if `learns`."""
    if imbalance is not None or not learns:
        return {"imbalance": imbalance or 0.0}
    pace = pace_here(cluster, model)
    if pace is None or not (pace.scatter or pace.straggling):
        return {"imbalance": 0.0}
    return {
        "imbalance": pace.scatter,
        "straggling": pace.straggling,
        "slow_rank": pace.slowest,
        "pace_runs": pace.runs,
    }


def fingerprint_of(model: ModelProfile) -> str:
    """Fingerprint of a model, excluding its block times and who named it: a script that trains it
    and `advise train:build` mean the same one."""
    plain = model.model_copy(update={"times": (), "name": "", "factory": None, "config": None})
    return fingerprint(plain.model_dump(mode="json"))


def keep_run(parallel: ParallelModel, *, peak_bytes: float | None = None) -> TrainingRun | None:
    """Log predicted and measured steps of `parallel`, for later estimates.

    `auto_parallelize` does so when the training is over; call this for shorter runs, or if the peak
    memory is known. Nothing is sent: rank 0 logs its own measurements, and a step takes all ranks
    equally long.

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


def keep_at_end(parallel: ParallelModel, *, learns: bool, anchors: bool) -> None:
    """Log the run when `parallel` is released or the process ends, unless already logged; with
    `anchors` also the residual of each term."""
    decision = parallel.decision
    if isinstance(decision, Decision):
        machine = runs.machine_of(decision.facts.cluster)
        seen = parallel.steps, decision, machine
        if learns:
            weakref.finalize(parallel, _keep_unasked, *seen)
        if anchors:
            weakref.finalize(parallel, _anchor_unasked, *seen)


def run_of(
    decision: Decision,
    machine: Machine,
    *,
    step: Timing,
    peak_bytes: float | None = None,
    pace: Pace | None = None,
) -> TrainingRun:
    """Combine the prediction of `decision` with measurements."""
    plan, predicted = decision.plan, decision.estimate
    facts = _paced(decision.facts, None)
    even_s = estimate(plan, facts).step_s
    peak = None
    if peak_bytes is not None:
        context, learned = facts.cluster.device.context_bytes, facts.cluster.learned
        memory = process_memory(CostModel(facts), plan, predicted)
        width = memory.high - memory.low
        peak = PeakRecord(
            predicted_bytes=memory.nbytes,
            measured_bytes=peak_bytes,
            doubt_bytes=max(0.0, width - (context.high - context.low)) / 2,
            offset_bytes=learned.context_offset_bytes if learned else 0.0,
        )
    return TrainingRun(
        machine=machine,
        model=facts.model.name,
        fingerprint=fingerprint_of(facts.model),
        plan=str(plan),
        dtype=facts.precision.dtype,
        predicted_s=even_s,
        parts=parts_of(plan, facts),
        step=step,
        peak=peak,
        pace=pace,
        even_share=even_s / estimate(plan, _paced(facts, pace)).step_s,
        ended_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _paced(facts: Facts, pace: Pace | None) -> Facts:
    """Return `facts` with one rank slowed by `pace`, if any. Scatter is ignored: it hardly affects
    the fast quartile that runs are fitted by."""
    slow = {"imbalance": 0.0, "straggling": pace.known.straggling if pace else 0.0}
    workload = facts.workload.model_copy(update=slow)
    return facts.rebuilt(workload=workload)


def _keep(
    steps: Steps, decision: Decision, machine: Machine, *, fewest: int, peak_bytes: float | None
) -> TrainingRun | None:
    timing = steps.timing(fewest=fewest)
    if steps.rank or timing is None:
        return None
    if peak_bytes is None and decision.plan.pp == 1:  # stages differ in memory
        peak_bytes = steps.peak_bytes
    run = run_of(decision, machine, step=timing, peak_bytes=peak_bytes, pace=steps.pace)
    runs.keep_run(run)
    steps.is_kept = True
    return run


def _keep_unasked(steps: Steps, decision: Decision, machine: Machine) -> None:
    """Suppress errors: logging must not disturb the end of a process."""
    if steps.is_kept:
        return
    try:
        _keep(steps, decision, machine, fewest=FEWEST_UNASKED, peak_bytes=None)
    except (AdvisorError, RuntimeError) as error:
        log.warning("the run is not kept: %s", error)


def _anchor_unasked(steps: Steps, decision: Decision, machine: Machine) -> None:
    try:
        _anchor(steps, decision, machine)
    except (AdvisorError, RuntimeError) as error:
        log.warning("the anchor is not kept: %s", error)


def _anchor(steps: Steps, decision: Decision, machine: Machine) -> None:
    step, update = steps.timing(fewest=FEWEST_STEPS), steps.update_timing(fewest=FEWEST_STEPS)
    if steps.rank or step is None or update is None:
        return
    plan = decision.plan
    measured = StepMeasurement(
        step=step,
        alone=step if plan.world_size == 1 else None,
        update=update,
        peak_bytes=steps.peak_bytes if plan.pp == 1 else None,
    )
    keep_anchor(anchor_of(plan, decision.facts, measured, machine))
