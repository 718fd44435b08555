"""A sweep on the ranks of this job: every plan is applied to the model built anew, and timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from advisor.auto import auto_parallelize
from advisor.choose import choose
from advisor.command import say
from advisor.decision import Decision
from advisor.look import look
from advisor.models import LoadedModel, load_model
from advisor.sweep.points import Case, Point, Settings, Sweep, Swept, cases, sweep_of
from engines.hybrid import apply_plan
from engines.parallel import ParallelModel
from engines.plan import format_setting
from engines.steps import WARM_UP_STEPS
from engines.world import World, join_world
from profiles.batch import Batch, map_batch
from profiles.bench import recall_or_bench
from profiles.cluster import ClusterProfile
from profiles.errors import InputError
from profiles.probe import probe
from profiles.provenance import Timing

STEPS = 10
"""After the warm-up; as often as PyTorch's tutorial repeats its timings."""
# Batch norms want two rows, and a profile is taken at some batch; what is timed is another.
_ROWS_LOOKED_AT = 2


@dataclass(frozen=True, slots=True)
class Subject:
    """What is timed, where, and how often."""

    model: str
    sequence_length: int | None
    cluster: ClusterProfile
    world: World
    steps: int

    def built(self) -> LoadedModel:
        return load_model(self.model, samples=_ROWS_LOOKED_AT, sequence_length=self.sequence_length)


def measured_sweep(
    model: str,
    swept: Swept,
    values: Sequence[str],
    *,
    settings: Settings,
    global_batch_size: int | None,
    sequence_length: int | None = None,
    steps: int = STEPS,
    cluster: ClusterProfile | None = None,
) -> Sweep:
    """`sweep` on this job's devices, with the steps of every plan timed beside. All ranks call it.

    Plans of one device run on every rank at once, each for itself. A range is the 10th to the 90th
    percentile of `steps` steps with AdamW, after a warm-up; data is one batch, over and over.

    Args:
        model: MODEL of the command line, built for every value anew.
        cluster: of this job, where it is known; else it is timed, or recalled.

    Raises:
        InputError: a quantity that a job cannot vary, or plans of another number of devices.
        PlanError: a value that allows no legal plan. NoPlanError: one at which nothing fits.
        RankError: a rank did not come in time.
    """
    if swept in (Swept.BANDWIDTH, Swept.DEVICES):
        raise InputError(
            f"a job has the {swept} that it has: there is nothing to vary and to measure",
            where="--measure",
            hints=["leave `--measure` out", "start one job for each"],
        )
    world = join_world()
    if cluster is None:
        cluster = recall_or_bench(probe()) if world.size > 1 else probe(measure=True)
    subject = Subject(model, sequence_length, cluster, world, steps)
    loaded = subject.built()
    facts = look(
        loaded.module,
        loaded.sample,
        loss_fn=loaded.loss_fn,
        cluster=cluster,
        global_batch_size=global_batch_size,
    )
    wanted = list(cases(facts, swept, values, settings=settings))
    for case in wanted:
        if case.facts.cluster.world_size not in (1, world.size):
            raise InputError(
                f"`{case.label}` is a plan of {case.facts.cluster.world_size} devices, this job has"
                f" {world.size}",
                where="--measure",
                hints=[f"start {case.facts.cluster.world_size} ranks for it"],
            )
    facts = facts.model_copy(update={"model": facts.model.model_copy(update={"name": loaded.name})})
    return sweep_of(facts, swept, tuple(_measured(case, subject) for case in wanted))


def _measured(case: Case, subject: Subject) -> Point:
    loaded = subject.built()
    with_all = case.facts.cluster.world_size == subject.world.size
    parallel = (_together if with_all else _apart)(case, subject, loaded)
    decision = parallel.decision
    assert isinstance(decision, Decision)
    if subject.world.rank == 0:
        say(f"timing {decision.plan} ...")
    timing = _timed(parallel, loaded.sample, subject)
    plan, estimate = decision.plan, decision.estimate
    return Point(
        label=case.label,
        value=case.value,
        plan=plan,
        devices=plan.world_size,
        step_s=estimate.step_s,
        low_s=estimate.step_low_s,
        high_s=estimate.step_high_s,
        peak_high_bytes=estimate.peak_high_bytes,
        fits=True,
        measured=timing,
    )


def _together(case: Case, subject: Subject, loaded: LoadedModel) -> ParallelModel:
    words = (f"{name}={format_setting(value)}" for name, value in case.settings.items())
    return auto_parallelize(
        loaded.module,
        sample=loaded.sample,
        loss_fn=loaded.loss_fn,
        plan=" ".join(words) or None,
        global_batch_size=case.facts.workload.global_batch_size,
        cluster=subject.cluster,
        learns=False,
    )


def _apart(case: Case, subject: Subject, loaded: LoadedModel) -> ParallelModel:
    """Every rank for itself, at the same time."""
    facts = look(
        loaded.module,
        loaded.sample,
        loss_fn=loaded.loss_fn,
        cluster=case.facts.cluster,
        global_batch_size=case.facts.workload.global_batch_size,
        pins=case.settings,
    )
    decision = choose(facts, pins=case.settings)
    parallel = apply_plan(
        loaded.module,
        decision.plan,
        profile=facts.model,
        cluster=facts.cluster,
        loss_fn=loaded.loss_fn,
        sample=loaded.sample,
        world=replace(subject.world, rank=0, size=1),
    )
    parallel.decision = decision
    return parallel


def _timed(parallel: ParallelModel, sample: Batch, subject: Subject) -> Timing:
    plan = parallel.plan
    assert plan.microbatch_size is not None
    rows = torch.arange(plan.microbatch_size * plan.forwards)

    def repeated(tensor: Tensor) -> Tensor:
        return tensor[rows % len(tensor)]

    batch = map_batch(repeated, sample)
    for _ in range(WARM_UP_STEPS + subject.steps):
        parallel.train_step(batch)
    if subject.world.device.type == "cuda":
        torch.cuda.synchronize()  # events are read when they are over
    timing = parallel.steps.timing()
    assert timing is not None  # there were steps after the warm-up
    return timing
