"""Sweep on the ranks of this job: each plan is applied to a fresh model and measured."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from advisor.auto.facts_from_module import facts_from_module
from advisor.auto.job import is_by_threads, machines_of
from advisor.auto.parallelize import auto_parallelize
from advisor.decide.choose import choose
from advisor.decide.decision import Decision
from advisor.inputs.console import say
from advisor.inputs.models import LoadedModel, load_model
from advisor.inputs.resize import resized
from advisor.whatif.sweep.points import Point, Sweep, SweepCase, Swept, cases, sweep_of
from engines.apply import apply_plan
from engines.parallel import ParallelModel
from engines.plan import PartialPlan, read_settings
from engines.runtime.steps import WARM_UP_STEPS
from engines.runtime.world import World, join_world
from engines.state.optimizer import OptimizerFactory
from profiles.capture.batch.call import Batch
from profiles.capture.batch.dims import Dims, dims_of
from profiles.capture.batch.rows import batch_size, repeat_rows, split_rows
from profiles.errors import InputError, RankError, UnknownNameError
from profiles.machine.cluster import ClusterProfile
from profiles.machine.probe import probe
from profiles.provenance import Timing
from profiles.record import json_object
from profiles.torch_compat import default_store

STEPS = 10
"""After the warm-up; as often as PyTorch's tutorial repeats its timings."""
PATIENCE_S = 120.0
"""For another rank: all do the same at the same time, so that one this late is gone."""
# Batch norms require two rows, and a profile needs some batch; the measured batch differs.
_ROWS_LOOKED_AT = 2
# A small rate keeps the numbers as they are; step time does not depend on it.
_RATE = 1e-6
OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd": partial(torch.optim.SGD, lr=_RATE),
    "sgd-momentum": partial(torch.optim.SGD, lr=_RATE, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=_RATE),
    "adamw": partial(torch.optim.AdamW, lr=_RATE),
    "adafactor": partial(torch.optim.Adafactor, lr=_RATE),
}
"""Those of `profiles.workload.optimizers` that torch has for parameters of any shape."""


class Announcements:
    """Messages of rank 0 through the rendezvous store while the others idle, in order.

    A collective would keep them busy, and could not report rank 0's progress.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._count = 0
        self._turn = 0
        if world.size > 1:
            self._turn = default_store().add(f"advisor/whatif/sweep/calls/{world.rank}", 1)

    def say(self, text: str = "") -> None:
        default_store().set(self._key(), text)

    def heard(self) -> str:
        """Wait for the next message.

        Raises:
            RankError: it did not come within the world's time limit.
        """
        key, world = self._key(), self._world
        try:
            default_store().wait([key], timedelta(seconds=world.timeout_s))
        except (dist.DistError, RuntimeError):
            raise RankError(
                f"rank 0 did not answer within {world.timeout_s:.0f} s",
                where=f"rank {world.rank} of {world.size}, standing idle while rank 0 runs",
                hints=["look at the output of rank 0", "give a longer `--timeout`"],
            ) from None
        return default_store().get(key).decode()

    def _key(self) -> str:
        self._count += 1
        return f"advisor/whatif/sweep/{self._turn}/{self._count}"


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """Model, cluster and number of steps of a measured sweep.

    Attributes:
        cluster: of the job, with `devices` of them in a plan of all.
        is_here: whether the model's blocks can be timed: its devices are those of this machine.
    """

    model: str
    sequence_length: int | None
    cluster: ClusterProfile
    is_here: bool
    devices: int
    optimizer: OptimizerFactory
    world: World
    words: Announcements
    steps: int

    def built(self) -> LoadedModel:
        return built(self.model, self.sequence_length)

    def machines(self, case: SweepCase) -> ClusterProfile:
        """Return the cluster with as many devices as the case has."""
        count = case.facts.cluster.world_size
        return self.cluster if count == self.devices else resized(self.cluster, count)


def measured_sweep(
    model: str,
    swept: Swept,
    values: Sequence[str],
    *,
    settings: PartialPlan,
    global_batch_size: int | None,
    sequence_length: int | None = None,
    optimizer: str = "adamw",
    steps: int = STEPS,
    timeout_s: float = PATIENCE_S,
    cluster: ClusterProfile | None = None,
) -> Sweep:
    """Run `sweep` on this job's devices and measure every plan's steps. All ranks call it.

    What is predicted rests on the model's blocks timed here first, at the rows of a split.
    Plans of one device run on rank 0 while the others stand idle. A range is the 10th to the 90th
    percentile of `steps` steps after a warm-up; data is one batch, over and over.

    Args:
        model: MODEL of the command line, built for every value anew.
        optimizer: one of `OPTIMIZERS`.
        timeout_s: bound of every wait for another rank.
        cluster: of this job, where it is known; else it is timed, or recalled.

    Raises:
        InputError: a quantity that a job cannot vary, or plans of another number of devices.
        PlanError: a value that allows no legal plan. NoPlanError: one at which nothing fits.
        RankError: a rank did not come in time, and which.
    """
    if swept is Swept.BANDWIDTH:
        raise InputError(
            f"a job has the {swept} that it has: there is nothing to vary and to measure",
            where="--measure",
            hints=["leave `--measure` out, or start one job for each"],
        )
    if optimizer not in OPTIMIZERS:
        raise UnknownNameError(
            "optimizer",
            optimizer,
            OPTIMIZERS,
            where="--measure",
            hints=["leave `--measure` out: others are predicted"],
        )
    world = join_world(timeout_s=timeout_s)
    loaded = load_model(model, samples=_ROWS_LOOKED_AT, sequence_length=sequence_length)
    cluster = cluster or machines_of(loaded.module, _most_driven(swept, values, settings), world)
    facts = facts_from_module(
        loaded.module,
        loaded.sample,
        loss_fn=loaded.loss_fn,
        cluster=cluster,
        global_batch_size=global_batch_size,
        optimizer=OPTIMIZERS[optimizer],
        partial=settings,
    )
    subject = MeasuredModel(
        model=model,
        sequence_length=sequence_length,
        cluster=cluster,
        is_here=cluster.device.name == probe().device.name,
        devices=facts.cluster.world_size,
        optimizer=OPTIMIZERS[optimizer],
        world=world,
        words=Announcements(world),
        steps=steps,
    )
    wanted = list(cases(facts, swept, values, settings=settings))
    for case in wanted:
        _require_ranks(case, world)
    facts = facts.model_copy(update={"model": facts.model.model_copy(update={"name": loaded.name})})
    return sweep_of(facts, swept, tuple(_measured(case, subject) for case in wanted))


def _most_driven(swept: Swept, values: Sequence[str], settings: PartialPlan) -> PartialPlan:
    """Of the plans those whose threads drive most devices, if there are threads."""
    plans = [read_settings(text) for text in values] if swept is Swept.PLAN else [settings]
    threads = [partial for partial in plans if is_by_threads(partial)]
    return max(threads, key=lambda partial: partial.dp_replicate or 0, default=settings)


def _require_ranks(case: SweepCase, world: World) -> None:
    devices = case.facts.cluster.world_size
    if devices in (1, world.size) or (world.size == 1 and is_by_threads(case.settings)):
        return
    raise InputError(
        f"`{case.label}` is a plan of {devices} devices, this job has {world.size}",
        where="--measure",
        hints=[f"start {devices} ranks for it: `torchrun --nproc-per-node {devices} ...`"],
    )


def _measured(case: SweepCase, subject: MeasuredModel) -> Point:
    is_alone = case.facts.cluster.world_size == 1 < subject.world.size
    loaded = subject.built()
    dims = case.facts.model.batch_dims
    loaded = replace(loaded, sample=repeated(loaded.sample, _rows(case), dims))
    parallel = (_alone if is_alone else _together)(case, subject, loaded)
    if is_alone and subject.world.rank > 0:
        while not (text := subject.words.heard()):  # a message per step
            pass
        return Point.build(json_object(text), where="rank 0")
    decision = parallel.decision
    assert isinstance(decision, Decision)
    if subject.world.rank == 0:
        say(f"timing {decision.plan} ...")
    timing = _timed(parallel, loaded.sample, subject, is_alone=is_alone)
    point = Point.of(case, decision.plan, decision.estimate, fits=True, measured=timing)
    if is_alone:
        subject.words.say(point.model_dump_json())
    return point


def _rows(case: SweepCase) -> int:
    """Samples of a timed block: those of a microbatch, if the case gives them."""
    most = case.facts.workload.global_batch_size
    named = case.settings.microbatch_size
    return max(_ROWS_LOOKED_AT, named or most)


def repeated(sample: Batch, rows: int, dims: Dims | None = None) -> Batch:
    """Repeat the rows of `sample`, up to `rows` of them."""
    dims = dims or dims_of(sample)
    every = repeat_rows(sample, -(-rows // batch_size(sample, dims)), dims)
    return split_rows(every, [rows, batch_size(every, dims) - rows], dims)[0]


def built(model: str, sequence_length: int | None) -> LoadedModel:
    """MODEL of the command line, the same on every rank: ranks of a replica need the same rows."""
    seed_everything()
    return load_model(model, samples=_ROWS_LOOKED_AT, sequence_length=sequence_length)


def is_on_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def fill(module: nn.Module) -> None:
    """Fill with values of typical magnitude, this module alone and not its parts."""
    for parameter in module.parameters(recurse=False):
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
        else:
            nn.init.ones_(parameter)
    for buffer in module.buffers(recurse=False):
        buffer.zero_()


def seed_everything() -> None:
    """Let factories of random models and data draw the same on every rank."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def _together(case: SweepCase, subject: MeasuredModel, loaded: LoadedModel) -> ParallelModel:
    return auto_parallelize(
        loaded.module,
        sample=loaded.sample,
        loss_fn=loaded.loss_fn,
        plan=case.settings,
        optimizer=subject.optimizer,
        global_batch_size=case.facts.workload.global_batch_size,
        cluster=subject.machines(case),
        timed=subject.is_here,
        learns=False,
        timeout_s=subject.world.timeout_s,
    )


def _alone(case: SweepCase, subject: MeasuredModel, loaded: LoadedModel) -> ParallelModel:
    """Apply the plan on each rank by itself; `apply_plan` requires all of them."""
    facts = facts_from_module(
        loaded.module,
        loaded.sample,
        loss_fn=loaded.loss_fn,
        cluster=subject.machines(case),
        global_batch_size=case.facts.workload.global_batch_size,
        optimizer=subject.optimizer,
        partial=case.settings,
        # The others stand idle, as they do when it trains.
        timed=subject.is_here and subject.world.rank == 0,
    )
    decision = choose(facts, partial=case.settings)
    parallel = apply_plan(
        loaded.module,
        decision.plan,
        profile=facts.model,
        cluster=facts.cluster,
        loss_fn=loaded.loss_fn,
        optimizer=subject.optimizer,
        sample=loaded.sample,
        world=replace(subject.world, rank=0, size=1),
    )
    parallel.decision = decision
    return parallel


def _timed(
    parallel: ParallelModel, sample: Batch, subject: MeasuredModel, *, is_alone: bool
) -> Timing:
    assert isinstance(parallel.decision, Decision)
    of_all = parallel.plan.global_batch_size
    assert of_all is not None
    dims = parallel.decision.facts.model.batch_dims
    batch = repeated(sample, of_all // parallel.data_world_size, dims)
    for _ in range(WARM_UP_STEPS + subject.steps):
        parallel.train_step(batch)
        if is_alone:
            subject.words.say()
    if subject.world.device.type == "cuda":
        torch.cuda.synchronize()  # complete the events before reading them
    timing = parallel.steps.timing()
    assert timing is not None  # steps follow the warm-up
    return timing
