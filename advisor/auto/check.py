"""Check: run a plan for some steps on this machine, to compare it with its estimate.

All ranks of a plan run if the job has as many. On CPU a thread's own time separates compute from
communication in those steps. On accelerators every rank repeats the steps without the others, with
torch's fake process groups; of a plan larger than the job only one rank runs, in this way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from advisor.auto.facts_from_module import facts_from_module
from advisor.auto.given_plan import partial_plan_of
from advisor.auto.job import machines_of
from advisor.auto.measure import OPTIMIZERS, built, fill, is_on_meta, repeated
from advisor.auto.parallelize import auto_parallelize
from advisor.auto.preflight import warn_of_risks
from advisor.cost import estimate
from advisor.decide.choose import choose
from advisor.decide.decision import Decision
from advisor.inputs.facts import Facts
from advisor.inputs.models import LoadedModel
from advisor.learning.anchor import Links
from advisor.learning.residuals import StepMeasurement
from engines.apply import apply_plan
from engines.parallel import ParallelModel
from engines.plan import Aggregation, Compression, DataParallel, Plan
from engines.runtime.fake_world import fake_world
from engines.runtime.product_time import ProductTime
from engines.runtime.steps import WARM_UP_STEPS
from engines.runtime.world import World, join_world, leave_world, rank_error_context
from profiles.allocator.process_peak import (
    peak_memory_bytes,
    release_freed_memory,
    reset_peak_memory,
)
from profiles.capture.batch.call import Batch
from profiles.errors import InputError, PlanError, UnknownNameError
from profiles.machine.bench import BUDGET_S, bench
from profiles.machine.cluster import ClusterProfile
from profiles.machine.probe import probe
from profiles.timing.stopwatch import default_device
from profiles.torch_compat import forget_groups

STEPS = 10
"""After the warm-up; as often as `advise sweep --measure` times its plans."""
LINKS_S = BUDGET_S
PRODUCT_STEPS = 3


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """Plan and model to run.

    Attributes:
        model: MODEL of the command line, built anew for every run.
        settings: of the plan, "tp=2 zero=1"; the rest is decided.
        optimizer: one of `advisor.auto.measure.OPTIMIZERS`.
        times_links: of all ranks, after the steps.
    """

    model: str
    settings: str = ""
    global_batch_size: int | None = None
    sequence_length: int | None = None
    optimizer: str = "adamw"
    precision: str | None = None
    steps: int = STEPS
    times_links: bool = False
    timeout_s: float | None = None

    def built(self) -> LoadedModel:
        """Build the model, fresh for each run."""
        return built(self.model, self.sequence_length)


@dataclass(frozen=True, slots=True)
class Checked:
    """A plan with its a-priori prediction, and one rank's measurements."""

    facts: Facts
    plan: Plan
    measured: StepMeasurement


def check(request: CheckRequest, cluster: ClusterProfile | None = None) -> Checked:
    """Run the requested or decided plan. All ranks of a job must call it.

    Args:
        cluster: that the plan is for, of devices as this machine has; None is this job.

    Raises:
        InputError: devices that this machine does not have, or an optimizer that cannot be run.
        PlanError: fewer ranks than the plan has, and one of them cannot be run by itself.
        NoPlanError: nothing fits. RankError: a rank did not come in time, and which.
    """
    if request.optimizer not in OPTIMIZERS:
        raise UnknownNameError("optimizer", request.optimizer, OPTIMIZERS, where="advise check")
    here = probe().device.name
    if cluster is not None and cluster.device.name != here:
        raise InputError(
            f"the plan is for {cluster.device.name}, this machine has {here}",
            where=f"cluster: {cluster.name}",
            hints=["run `advise check` on one of its devices", "or leave `--cluster` out"],
        )
    world = join_world(timeout_s=request.timeout_s)
    machines = cluster or machines_of(
        request.built().module, partial_plan_of(request.settings), world
    )
    if world.size == machines.world_size:
        return _with_all_ranks(request, machines, world)
    if world.size > 1:
        raise PlanError(
            f"the plan is for {machines.world_size} devices, this job has {world.size} ranks",
            where=f"cluster: {machines.name}",
            hints=[
                f"start {machines.world_size} ranks: all are run",
                "or start one, without torchrun: one rank of the plan is run",
            ],
        )
    return _with_one_rank(request, machines)


def _with_all_ranks(request: CheckRequest, machines: ClusterProfile, world: World) -> Checked:
    loaded = request.built()
    parallel = auto_parallelize(
        loaded.module,
        sample=loaded.sample,
        loss_fn=loaded.loss_fn,
        plan=request.settings or None,
        optimizer=OPTIMIZERS[request.optimizer],
        global_batch_size=request.global_batch_size,
        precision=request.precision,
        weights=fill if is_on_meta(loaded.module) else None,
        on_nonfinite="ignore",  # values that are made up may be of any size
        cluster=machines,
        learns=False,
        timeout_s=request.timeout_s,
    )
    decision = parallel.decision
    assert isinstance(decision, Decision)
    facts, plan = decision.facts, decision.plan
    combined = run(parallel, loaded, world.device, steps=request.steps)
    if request.times_links and world.size > 1:
        combined = replace(combined, links=links(plan, facts))
    del parallel, loaded
    if world.size == 1:
        return Checked(facts, plan, replace(combined, alone=combined.step))
    with rank_error_context("leaving the job"):
        dist.barrier()
    leave_world()
    forget_groups()
    alone = combined
    if why_not_alone(plan):
        alone = replace(combined, alone=None)
    elif world.device.type == "cuda":
        release_freed_memory()
        alone = _alone(request, facts, plan, rank=world.rank, device=world.device)
    share = alone.products_share
    return Checked(facts, plan, replace(combined, alone=alone.alone, products_share=share))


def _with_one_rank(request: CheckRequest, machines: ClusterProfile) -> Checked:
    loaded, partial = request.built(), partial_plan_of(request.settings)
    facts = facts_from_module(
        loaded.module,
        loaded.sample,
        loss_fn=loaded.loss_fn,
        cluster=machines,
        global_batch_size=request.global_batch_size,
        optimizer=OPTIMIZERS[request.optimizer],
        precision=request.precision,
        partial=partial,
    )
    decision = choose(facts, partial=partial)
    warn_of_risks(decision, ranks=machines.world_size)
    plan = decision.plan
    del loaded
    problem = why_not_alone(plan)
    if problem:
        raise PlanError(
            f"one of {plan.world_size} ranks cannot be run by itself: {problem}",
            where=f"plan: {plan}",
            hints=[
                'fix a plan of which it can, as `--plan "pp=1"`: other plans carry its residuals',
                f"or start {plan.world_size} ranks",
            ],
        )
    measurement = _alone(request, facts, plan, rank=0, device=default_device())
    return Checked(facts, plan, replace(measurement, step=None))


def links(plan: Plan, facts: Facts) -> Links:
    """Measure all links between compute, with messages up to those of the plan."""
    largest = max((item.payload_bytes for item in estimate(plan, facts).traffic), default=0)
    return Links.of(bench(facts.cluster, budget_s=LINKS_S, max_bytes=int(largest)))


def why_not_alone(plan: Plan) -> str:
    """Reason why one rank of the plan cannot run a step without the others; empty if it can."""
    if plan.pp > 1:
        return "stages of a pipeline work on what others send"
    if plan.data_parallel is DataParallel.THREADS:
        return "its replicas are threads of one process"
    if not plan.updates_in_step:
        return "ranks update at different times"
    is_plain = plan.aggregation is Aggregation.BACKEND and plan.compression is Compression.NONE
    return "" if is_plain else "gradients are not summed up by the backend"


def _alone(
    request: CheckRequest, facts: Facts, plan: Plan, *, rank: int, device: torch.device
) -> StepMeasurement:
    """Run the steps of one rank without the others."""
    loaded = request.built()
    with fake_world(rank, plan.world_size, device) as world:
        parallel = apply_plan(
            loaded.module,
            plan,
            profile=facts.model,
            cluster=facts.cluster,
            loss_fn=loaded.loss_fn,
            optimizer=OPTIMIZERS[request.optimizer],
            sample=loaded.sample,
            weights=fill if is_on_meta(loaded.module) else None,
            world=world,
        )
        return run(parallel, loaded, world.device, steps=request.steps)


def run(
    parallel: ParallelModel, loaded: LoadedModel, device: torch.device, *, steps: int = STEPS
) -> StepMeasurement:
    """Run some steps of a plan on one batch: medians, and peaks at two microbatch sizes.

    On CUDA steps are timed by events in the stream, and tensors are counted by the allocator.
    """
    plan = parallel.plan
    assert plan.microbatch_size is not None
    smaller = None
    if plan.microbatch_size > 1:
        rows = plan.microbatch_size // 2
        with _peak_begun(device):
            _step(parallel, loaded, rows, WARM_UP_STEPS)
        with _peak_begun(device):
            _step(parallel, loaded, rows, 1)
        allocated = _allocated_bytes(device)
        smaller = rows, float(allocated or peak_memory_bytes(device))
    with _peak_begun(device):
        _step(parallel, loaded, plan.microbatch_size, WARM_UP_STEPS)
    peak, allocated = peak_memory_bytes(device), _allocated_bytes(device)
    _step(parallel, loaded, plan.microbatch_size, steps)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # complete the events before reading them
    step, update = parallel.steps.timing(), parallel.steps.update_timing()
    assert step is not None  # steps follow the warm-up
    assert update is not None
    return StepMeasurement(
        step=step,
        alone=parallel.steps.busy_timing() or step,
        update=update,
        products_share=products_share(
            parallel, _batch(parallel, loaded, plan.microbatch_size), device
        ),
        peak_bytes=peak,
        allocated_bytes=allocated,
        smaller=smaller,
    )


def _step(parallel: ParallelModel, loaded: LoadedModel, rows: int, count: int) -> None:
    batch = _batch(parallel, loaded, rows)
    for _ in range(count):
        parallel.train_step(batch)


def _batch(parallel: ParallelModel, loaded: LoadedModel, rows: int) -> Batch:
    return repeated(loaded.sample, rows * parallel.plan.forwards)


def products_share(parallel: ParallelModel, batch: Batch, device: torch.device) -> float | None:
    """Share of matrix products and attention in a step's forward and backward; all ranks call it.
    None if a step is compiled or has several threads."""
    if parallel.plan.compile or why_not_alone(parallel.plan):
        return None
    products = ProductTime(device)
    for _ in range(PRODUCT_STEPS):
        for watched in (
            products,
            products.whole(),
        ):  # alternate, for equal disturbance
            with watched:
                parallel.forward_backward(batch)
            parallel.optimizer.zero_grad(set_to_none=True)
    return products.share


@contextmanager
def _peak_begun(device: torch.device) -> Iterator[None]:
    """Reset the peak: release freed memory first, and wait for kernels."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    release_freed_memory()
    reset_peak_memory(device)
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _allocated_bytes(device: torch.device) -> float:
    """Peak bytes of tensors; 0 if the allocator does not count."""
    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else 0.0
