"""A rank's step as a trace for the caching allocator: its units' tensors, in microbatch order.

For torch's own allocations: parameters and their shards, gathers and reductions of FSDP2, DDP's
buckets, a pipeline's stages. Stacks with their own states allocate few large buffers at startup,
which a step does not show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from advisor.cost.context import CostContext
from advisor.cost.estimates.staged import StageLayout, laid_out
from advisor.cost.load.loads import Loads
from advisor.cost.load.unit_load import UnitLoad
from advisor.cost.memory.allocator import workspace_bytes
from advisor.cost.memory.buffers import KEEPS_PARAMETERS, WHOLE, shard_degree
from advisor.cost.memory.timeline import saved_bytes
from advisor.cost.stages.orders import ONE_STAGE, PassKind, order_of
from engines.plan import DataParallel, Offload, Plan, Recompute, Schedule
from profiles.allocator.step_replay import Pass, Replayed, Resident, UnitMemory, replay_stages
from profiles.allocator.unit_memory import parameter_tensors, saved_sizes, scaled
from profiles.model.profile import UnitProfile
from profiles.units import MIB
from profiles.workload.optimizers import Upkeep

# A first microbatch makes gradients, a second one adds to them: more are like it.
MICROBATCHES = 2


@dataclass(frozen=True, slots=True)
class RankStep:
    """Inputs of `profiles.allocator.step_replay`."""

    stages: Sequence[Sequence[UnitMemory]]
    standing: Resident
    order: Sequence[Pass]

    def replay(self) -> Replayed:
        """Replay on a device with enough memory."""
        return replay_stages(self.stages, self.standing, order=self.order)


def can_replay(costs: CostContext, plan: Plan) -> bool:
    """Return True if all of the plan's memory is in torch's allocator, as torch allocates it."""
    return (
        costs.facts.cluster.device.kind != "cpu"
        and costs.stack.states is None
        and plan.data_parallel is not DataParallel.THREADS
        and plan.offload is Offload.NONE
        and plan.updates_in_step
    )


def rank_step(costs: CostContext, plan: Plan, rank: int = 0) -> RankStep:
    """Step of a rank of the pp axis.

    Raises:
        PlanError: a pipeline without a schedule.
    """
    batch = (costs.batch_bytes(plan), float(costs.facts.model.buffer_bytes))
    if plan.pp == 1:
        parts = [costs.own_loads(plan)]
        update = costs.update(plan, 0, len(costs.facts.model.units))
        order = [
            Pass(is_forward, 0, microbatch)
            for microbatch in range(min(MICROBATCHES, plan.forwards))
            for is_forward in (True, False)
        ]
        received: tuple[float, ...] = ()
    else:
        layout = laid_out(costs, plan)
        parts = [stage.part for stage in layout.of(rank)]
        update = costs.update_of(plan, [layout.places[stage] for stage in layout.own[rank]], [])
        order = _order(plan, rank, stages=len(layout.stages), own=layout.own[rank])
        received = _received(layout, rank)
    return RankStep(
        stages=[_units(costs, plan, part) for part in parts],
        standing=_standing(costs, plan, parts, update, always=(*batch, *received)),
        order=order,
    )


def _received(layout: StageLayout, rank: int) -> tuple[float, ...]:
    """Messages at the fullest moment: what microbatches in flight received and do not save, and a
    gradient for each stage."""
    chunks = [layout.stages.memory(stage)[1] for stage in layout.own[rank]]
    fullest = max(layout.in_flight(rank), key=lambda moment: sum(moment.saved))
    arrived = [
        chunk.arrived_bytes
        for count, chunk in zip(fullest.saved, chunks, strict=True)
        for _ in range(count)
    ]
    return (*filter(None, arrived), *filter(None, (chunk.returned_bytes for chunk in chunks)))


def _order(plan: Plan, rank: int, *, stages: int, own: Sequence[int]) -> list[Pass]:
    """Enough microbatches to fill the pipeline and reach a steady state."""
    schedule = plan.schedule
    assert schedule is not None
    microbatches = plan.microbatches
    if schedule is Schedule.NAIVE:
        microbatches = min(microbatches, MICROBATCHES)
    elif schedule is not Schedule.GPIPE:
        enough = plan.pp + MICROBATCHES if schedule in ONE_STAGE else 2 * plan.pp
        microbatches = min(microbatches, enough)
    actions = order_of(schedule, rank, ranks=plan.pp, stages=stages, microbatches=microbatches)
    return [
        Pass(action.kind is PassKind.FORWARD, own.index(action.stage), action.microbatch)
        for action in actions
        if action.kind is not PassKind.WEIGHT
    ]


def _standing(
    costs: CostContext,
    plan: Plan,
    parts: Sequence[Loads],
    update: Upkeep,
    *,
    always: tuple[float, ...],
) -> Resident:
    local = sum(part.parameter_bytes for part in parts) / shard_degree(plan)
    gradients = sum(part.gradient_bytes for part in parts)
    root = sum(part.root_parameter_bytes * part.compute_share for part in parts)
    root *= plan.data_parallel.is_sharded
    states = update.state_bytes / local if local else 0.0
    buckets = (
        ceil(gradients / (plan.bucket_mib * MIB)) if plan.is_replicated and plan.pp == 1 else 0
    )
    workspaces = costs.stack.workspaces
    workspace = workspace_bytes(costs.facts.cluster.device, costs.stack) / max(1, workspaces)
    return Resident(
        always=(*always, root, *(workspace,) * workspaces),
        state_copies=(states / 2, states / 2) if states else (),
        step_copies=update.list_bytes / local if local else 0.0,
        buckets=(gradients / buckets,) * buckets if buckets else (),
    )


def _units(costs: CostContext, plan: Plan, loads: Loads) -> list[UnitMemory]:
    """Tensors of every run of equal units on one rank."""
    profiles = {unit.name: unit for unit in costs.facts.model.units}
    return [
        _unit(
            costs, plan, load, profiles[load.name], share=loads.compute_share, samples=loads.samples
        )
        for load in loads.runs
    ]


def _unit(
    costs: CostContext,
    plan: Plan,
    load: UnitLoad,
    profile: UnitProfile,
    *,
    share: float,
    samples: float,
) -> UnitMemory:
    kind, degree = plan.data_parallel, shard_degree(plan)
    sizes = parameter_tensors(profile)
    tensors = saved_sizes(profile.cost(costs.numerics(plan)), samples)
    saved = saved_bytes(load, plan.recompute)
    again = load.activation_bytes - saved if load.is_block else 0.0
    copy = load.parameter_bytes * share
    # Copies for compute: by autocast, or gathered once for all microbatches.
    is_cast = kind in WHOLE and share != 1 and load.is_multiplied
    casts = copy * (kind in KEEPS_PARAMETERS or is_cast)
    saved_tensors = scaled(tensors, saved)
    if again > 0 and plan.recompute is Recompute.FULL:
        saved_tensors = (saved,) if saved else ()
    gathers = kind.is_sharded and load.is_separate and not casts
    # Stages of a pipeline reduce when a round is over, ZeRO-1 after the last microbatch; until then
    # gradients are whole.
    late = plan.pp > 1 or (kind is DataParallel.ZERO1 and plan.forwards > 1)
    is_own = load.is_separate and not load.is_late
    reduces = kind.is_sharded and is_own and not late
    gradients = load.gradient_bytes / degree if reduces else load.gradient_bytes
    if kind.is_sharded and not is_own and not late:
        gradients *= share  # unsharded to the end of the backward, in the compute dtype
    return UnitMemory(
        parameters=scaled(sizes, load.parameter_bytes / degree),
        gradients=scaled(sizes, gradients),
        whole_gradients=scaled(sizes, load.gradient_bytes * share) if reduces else (),
        reduced=(load.gradient_bytes,) if reduces else (),
        saved=scaled(sizes, casts) + saved_tensors,
        again=scaled(tensors, again) if again > 0 else (),
        forward_bytes=load.forward_transient_bytes + casts + saved * (again > 0),
        backward_bytes=load.backward_transient_bytes,
        gathered=(copy,) if gathers else (),
        count=load.count,
    )
