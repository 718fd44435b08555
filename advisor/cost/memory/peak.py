"""Peak memory from a timeline of a step.

Moments: the forward of each unit, the loss, the backward of each unit in reverse and the reduction
of its gradients, the reduction of the root group, the optimizer step. Each is a sum of live bytes,
so the peak is one moment and not a sum of maxima. Stages of pipelines: `stage_memory`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from advisor.cost.breakdown import Memory
from advisor.cost.calibration import CALIBRATION, Calibration
from advisor.cost.load.loads import ACTIVATION_ERROR, Loads, describe
from advisor.cost.memory.allocator import (
    USUAL_SLACK,
    other_streams,
    upper_end,
    workspace_bytes,
)
from advisor.cost.memory.buffers import BUCKET_BYTES as BUCKET_BYTES
from advisor.cost.memory.buffers import KEEPS_PARAMETERS as KEEPS_PARAMETERS
from advisor.cost.memory.buffers import WHOLE as WHOLE
from advisor.cost.memory.buffers import (
    Gathered,
    Gradients,
    gathered_by_torch,
    gradients_of_torch,
    own_gathered,
    own_gradients,
    reduction_share,
)
from advisor.cost.memory.buffers import added_share as added_share
from advisor.cost.memory.buffers import shard_degree as shard_degree
from advisor.cost.memory.offload import (
    activations_leave,
    away_bytes,
    chunk_share,
    optimizer_leaves,
    states_leave,
)
from advisor.cost.memory.states import ResidentStates, resident_states, zero_level
from advisor.cost.memory.timeline import MicrobatchTimeline, timeline_of
from engines.plan import DataParallel, OffloadTo, Plan
from profiles.machine.cluster import Device
from profiles.model.profile import LOSS
from profiles.workload.optimizer_states import FP32_BYTES
from profiles.workload.optimizers import Upkeep
from profiles.workload.stack import TORCH, Stack

# FSDP2 holds a gathered unit, its flat gather buffer and the unit prefetched next: two whole units
# if the host does not run ahead, three if it does.
UNITS_WHEN_AHEAD = 1


class Moment(NamedTuple):
    """Live bytes at one point of a step, without permanent ones; `loss` of them are the loss's."""

    event: str
    unit: str | None = None
    gradients: float = 0.0
    activations: float = 0.0
    gathered: float = 0.0
    transient: float = 0.0
    loss: float = 0.0

    @property
    def total(self) -> float:
        return self.gradients + self.activations + self.gathered + self.transient

    @property
    def phase(self) -> str:
        return self.event if self.unit is None else f"{self.event} of {describe(self.unit)}"


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak of a step, with its range. `host_bytes` and `disk_bytes` are one rank's offloaded
    bytes."""

    memory: Memory
    phase: str
    low_bytes: float
    high_bytes: float
    reserved_bytes: float
    states_bytes: float
    host_bytes: float
    disk_bytes: float
    loss_bytes: float


def peak(
    plan: Plan,
    loads: Loads,
    *,
    update: Upkeep,
    device: Device,
    batch_bytes: float,
    exchange_bytes: float = 0.0,
    stack: Stack = TORCH,
    calibration: Calibration = CALIBRATION,
) -> Peak:
    """Peak of a step under `plan` on one rank that has the whole model.

    `update` is of the rank's part of the parameters. `batch_bytes` is the rank's whole part of the
    batch, on the device for the whole step. `exchange_bytes` are the buffers of gradient
    compression and of aggregations by the engine.
    """
    own: ResidentStates | None = None
    if stack.states is not None:
        own = resident_states(
            stack.states,
            plan,
            [loads],
            update=update,
            degree=shard_degree(plan),
            folds_experts=stack.folds_experts,
        )
        exchange_bytes += stack.bucket_bytes or 0.0
    own_gradient_bytes = own.gradients if own is not None else 0.0
    moments = moments_of(
        plan, loads, device=device, stack=stack, own_gradient_bytes=own_gradient_bytes
    )
    last = last_moment(plan, loads, update, device, stack=stack, own=own)
    moments += [last] if last is not None else []
    fullest = max(moments, key=lambda moment: moment.total)
    copy, idle = largest_copy(plan, loads, stack), 0.0
    if stack.states is None and device.kind != "cpu":
        computing = max(moment.total - moment.gradients for moment in moments)
        on_device = not states_leave(plan, device)
        reserved = other_streams(plan, loads, computing=computing, copy=copy, on_device=on_device)
        idle = max(0.0, reserved - fullest.total)
    return peak_at(
        fullest._replace(gathered=fullest.gathered + exchange_bytes),
        plan,
        parameter_bytes=loads.parameter_bytes,
        gradient_bytes=loads.gradient_bytes,
        update=update,
        device=device,
        batch_bytes=batch_bytes + loads.buffer_bytes,
        unsharded_bytes=loads.unsharded_bytes + loads.whole_bytes,
        unsharded_gradient_bytes=loads.unsharded_bytes + loads.whole_gradient_bytes,
        ahead=UNITS_WHEN_AHEAD * copy,
        idle=idle,
        away=away_bytes(plan, loads, update, device),
        stack=stack,
        own=own,
        calibration=calibration,
        activation_error=loads.activation_error,
    )


def moments_of(
    plan: Plan,
    loads: Loads,
    *,
    device: Device,
    stack: Stack = TORCH,
    own_gradient_bytes: float = 0.0,
    line: MicrobatchTimeline | None = None,
) -> list[Moment]:
    """Moments of a step before the optimizer's, on a rank that has the whole model.

    Their sharded bytes are proportional to 1/degree; all others are independent of it.

    Args:
        own_gradient_bytes: of all gradients, in a stack with states of its own.
        line: of the loads, if known.
    """
    on_device = not states_leave(plan, device)
    line = line or timeline_of(loads, plan.recompute, away=activations_leave(plan, device))
    ends: Iterable[Moment] = ()
    if stack.states is None:
        where = {"on_device": on_device, "copies": device.kind == "cpu"}
        gradients = gradients_of_torch(plan, loads, **where)
        gathered = gathered_by_torch(plan, loads, stack)
        ends = _last_reductions(plan, loads, gradients, **where)
    else:
        gradients = own_gradients(own_gradient_bytes, loads, stack)
        gathered = own_gathered(plan, loads)
    return [
        *forward_moments(loads, line, gradients, gathered),
        *backward_moments(plan, loads, line, gradients, gathered),
        *ends,
    ]


def last_moment(
    plan: Plan,
    loads: Loads,
    update: Upkeep,
    device: Device,
    *,
    stack: Stack = TORCH,
    own: ResidentStates | None = None,
) -> Moment | None:
    """Moment of the optimizer's step; None if it runs elsewhere."""
    on_device = not states_leave(plan, device)
    if optimizer_leaves(plan, device) or (device.kind == "cpu" and not on_device):
        return _step_in_chunks(plan, loads, update, device)
    if not on_device:
        return None
    return optimizer_step(plan, loads.gradient_bytes, update, device, stack=stack, own=own)


def peak_at(
    fullest: Moment,
    plan: Plan,
    *,
    parameter_bytes: float,
    gradient_bytes: float,
    update: Upkeep,
    device: Device,
    batch_bytes: float,
    ahead: float,
    idle: float = 0.0,
    buffer_bytes: float = 0.0,
    unsharded_bytes: float = 0.0,
    unsharded_gradient_bytes: float = 0.0,
    away: float = 0.0,
    stack: Stack = TORCH,
    own: ResidentStates | None = None,
    calibration: Calibration = CALIBRATION,
    activation_error: float = ACTIVATION_ERROR,
) -> Peak:
    """Peak of moment `fullest` and permanent bytes, with its range.

    Args:
        ahead: gathers of a host that runs ahead.
        idle: reserved for streams that do nothing at the moment.
        unsharded_bytes, unsharded_gradient_bytes: of parameters that are not sharded.
        away: offloaded bytes other than sharded states.
        own: states of a stack that manages its own.
        activation_error: half-width of the range of activations, as a fraction.
    """
    degree, offloaded = shard_degree(plan), states_leave(plan, device)
    on_disk = plan.offload_to is OffloadTo.DISK
    parameters, states = parameter_bytes / degree + unsharded_bytes, update.state_bytes
    resident = parameters + gradient_bytes / degree + unsharded_gradient_bytes + states
    if own is not None:
        parameters, states, resident = own.parameters, own.optimizer, own.total
    memory = Memory(
        parameters=unsharded_bytes if offloaded else parameters,
        gradients=fullest.gradients + (unsharded_gradient_bytes if own is None else 0.0),
        optimizer=0.0 if offloaded or optimizer_leaves(plan, device) else states,
        activations=fullest.activations,
        gathered=fullest.gathered,
        transient=fullest.transient,
        batch=batch_bytes,
        transfers=buffer_bytes,
        workspaces=workspace_bytes(device, stack),
        context=device.context_bytes.value,
    )
    allocated = memory.total - memory.context
    off_device = (resident if offloaded else 0.0) + away
    doubtful = memory.activations + memory.transient
    usual = USUAL_SLACK if stack.states is None else calibration.slack
    usual = usual if stack.allocator_slack is None else stack.allocator_slack
    slack = usual if device.kind != "cpu" else 0.0
    return Peak(
        memory=memory,
        phase=fullest.phase,
        low_bytes=allocated - min(1.0, activation_error) * doubtful + device.context_bytes.low,
        high_bytes=upper_end(
            allocated, device, doubtful=doubtful, ahead=ahead, error=activation_error
        ),
        reserved_bytes=allocated * (1 + slack) + idle + memory.context,
        states_bytes=resident,
        host_bytes=0.0 if on_disk else off_device,
        disk_bytes=off_device if on_disk else 0.0,
        loss_bytes=fullest.loss,
    )


def largest_copy(plan: Plan, loads: Loads, stack: Stack = TORCH) -> float:
    """Largest gathered unit, which a host that runs ahead gathers early."""
    if not plan.data_parallel.is_sharded or (stack.states is not None and zero_level(plan) < 3):
        return 0.0
    return max((u.parameter_bytes for u in loads.separate), default=0.0) * loads.compute_share


def forward_moments(
    loads: Loads, line: MicrobatchTimeline, gradients: Gradients, gathered: Gathered
) -> Iterator[Moment]:
    for i, unit in enumerate(loads.entries):
        if unit.count == 1:
            yield Moment(
                "forward",
                unit.name,
                gradients=gradients.in_forward,
                activations=line.before[i],
                gathered=gathered(i, line.after[i], True) + gradients.carried,
                transient=line.forward[i],
                loss=line.forward[i] * (unit.name == LOSS),
            )


def backward_moments(
    plan: Plan, loads: Loads, line: MicrobatchTimeline, gradients: Gradients, gathered: Gathered
) -> Iterator[Moment]:
    """Moments of each unit's backward with its recomputed forward, and its reduction."""
    units = loads.entries
    # ZeRO-2 keeps parameters where microbatches follow, of which each is reduced.
    keeps = plan.data_parallel is DataParallel.ZERO2 and plan.forwards > 1
    for i in reversed(range(len(units))):
        unit = units[i]
        if unit.count > 1:
            continue
        live_gradients = gradients.in_backward(i)
        whole = gathered(i, line.following[i], False)
        yield Moment(
            "backward",
            unit.name,
            gradients=live_gradients,
            activations=line.live[i],
            gathered=whole + gradients.buffers(i),
            transient=line.backward[i],
            loss=(line.saved[i] + line.backward[i]) * (unit.name == LOSS),
        )
        if gradients.reduced is not None and unit.is_separate and not unit.is_late:
            freed = 0.0 if keeps else unit.parameter_bytes
            yield Moment(
                "reduction",
                unit.name,
                gradients=live_gradients,
                activations=line.live[i] - line.saved[i],
                gathered=whole - freed * loads.compute_share + gradients.reduced(i),
                transient=unit.input_bytes,
            )


def _last_reductions(
    plan: Plan, loads: Loads, gradients: Gradients, *, on_device: bool, copies: bool
) -> Iterator[Moment]:
    """After the backward the root group is reduced as one tensor, then late units one by one."""
    if not plan.data_parallel.is_sharded:
        return
    share, live = loads.compute_share, gradients.in_backward(0)
    units = [unit for unit in loads.separate if unit.is_late]
    late = sum(share * (u.parameter_bytes + u.gradient_bytes) * u.count for u in units)
    reduced = reduction_share(share, copies=copies)
    root = share * loads.root_parameter_bytes + reduced * loads.root_gradient_bytes
    yield Moment("reduction of the root group", gradients=live, gathered=root + late)
    if units:
        first = max(units, key=lambda unit: unit.gradient_bytes)
        own = (reduced - share + on_device / shard_degree(plan)) * first.gradient_bytes
        yield Moment("reduction", first.name, gradients=live, gathered=late + own)


def optimizer_step(
    plan: Plan,
    gradient_bytes: float,
    update: Upkeep,
    device: Device,
    *,
    stack: Stack = TORCH,
    own: ResidentStates | None = None,
) -> Moment:
    """Temporaries of the optimizer step.

    torch's default on accelerators is foreach: for Adam one list of tensors as large as all local
    parameters (`_foreach_sqrt` in torch/optim/adam.py). On the CPU it steps tensor by tensor.
    """
    work = update.loop_bytes if device.kind == "cpu" else update.list_bytes
    work = 0.0 if stack.fused_optimizer else work
    states = stack.states
    if states is not None and own is not None and states.master and states.gradient < FP32_BYTES:
        # Gradients of the shard are copied to fp32 for the step (DeepSpeed's fp16 optimizers,
        # Megatron-LM's Float16Optimizer: main_param.grad = grad.float()).
        work += gradient_bytes / shard_degree(plan)
    if own is not None and stack.gather_bytes is not None and shard_degree(plan) > 1:
        work = max(work, min(stack.gather_bytes, own.parameters))
    return Moment(
        event=f"{update.name} step",
        gradients=gradient_bytes / shard_degree(plan) if own is None else own.gradients,
        transient=work,
    )


def _step_in_chunks(plan: Plan, loads: Loads, update: Upkeep, device: Device) -> Moment:
    """Temporaries of a step by chunks, with a chunk's states; a CPU reads them from files."""
    gradient_bytes = 0.0 if states_leave(plan, device) else loads.gradient_bytes
    whole = optimizer_step(plan, gradient_bytes, update, device)
    fetched = update.state_bytes if device.kind != "cpu" else 0.0
    return whole._replace(transient=(whole.transient + fetched) * chunk_share(loads))
