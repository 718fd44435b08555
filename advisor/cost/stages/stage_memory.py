"""Peak memory of a pipeline rank: moments of its stages plus other microbatches in flight.

The fullest moments of each stage's forward and backward are those without stages. The activations
of microbatches in flight, what they received, and unsharded gradients until the round ends are
added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from advisor.cost.calibration import CALIBRATION, Calibration
from advisor.cost.load.loads import Loads
from advisor.cost.memory.buffers import (
    KEEPS_PARAMETERS,
    WHOLE,
    Gathered,
    Gradients,
    late_bytes,
    own_gathered,
    own_gradients,
    shard_degree,
)
from advisor.cost.memory.offload import states_leave
from advisor.cost.memory.peak import (
    BUCKET_BYTES,
    UNITS_WHEN_AHEAD,
    Moment,
    Peak,
    backward_moments,
    forward_moments,
    largest_copy,
    optimizer_step,
    peak_at,
)
from advisor.cost.memory.round_shares import round_shares
from advisor.cost.memory.states import resident_states
from advisor.cost.memory.timeline import saved_bytes, timeline_of
from advisor.cost.stages.orders import InFlight, PassKind
from engines.plan import Plan, Schedule
from profiles.machine.cluster import Device
from profiles.model.profile import LOSS
from profiles.workload.optimizers import Upkeep
from profiles.workload.stack import TORCH, Stack

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Amount = TypeVar("Amount", float, NDArray[np.float64])
    """Of one stage, or of many."""


# Buffers of the last stage, one more than its microbatches in flight.
READ_OUT_BUFFERS = 2


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of a pipeline stage, or the whole model, for one microbatch.

    Attributes:
        forward, backward: the fullest moments, without other microbatches and their gradients.
        first_backward: the fullest of a backward that makes all gradients, with those made so far.
        saved_bytes: of a microbatch between its forward and its backward: activations, sent
            outputs and received inputs.
        own_bytes: all activations.
        arrived_bytes: of received inputs that a forward does not save.
        returned_bytes: of the received gradient, until the backward is done.
        cast_bytes: autocast copies of the weights, saved as well.
        waiting_bytes: gradients between layers, if weight gradients are computed later. A stage
            that receives nothing computes none before those.
    """

    forward: Moment
    backward: Moment
    first_backward: Moment
    saved_bytes: float
    own_bytes: float
    arrived_bytes: float
    returned_bytes: float
    cast_bytes: float
    waiting_bytes: float


def chunk_of(
    plan: Plan,
    loads: Loads,
    *,
    received_bytes: float,
    sent_bytes: float,
    messages: tuple[float, float],
    stack: Stack = TORCH,
) -> StageMemory:
    """Memory of the units of `loads` as one stage of `plan`.

    Gradients of other microbatches are unsharded until a round ends, and so are the parameters that
    ZeRO-1 and ZeRO-2 gather: both are counted per rank, not per stage (see `stage_peak`).

    Args:
        received_bytes, sent_bytes: of one microbatch, over the borders before and after the stage.
        messages: bytes of the activations and of the gradients that it receives.
    """
    share, kind = loads.compute_share, plan.data_parallel
    units = loads.entries
    one_by_one = kind.is_sharded and kind not in KEEPS_PARAMETERS
    copies = [u.parameter_bytes * share * (one_by_one and u.is_separate) for u in units]

    def by_torch(i: int, following: int, forward: bool) -> float:
        return copies[i] + (copies[following] if 0 <= following < len(copies) else 0.0)

    # Each unit's new gradient is allocated before it is added to those of other microbatches.
    made = share if kind.is_sharded else 1.0
    late = late_bytes(units, share * one_by_one, with_gradients=False)
    seen = list(accumulate(unit.gradient_bytes * unit.count for unit in units))
    gradients = Gradients(
        0.0, lambda i: seen[-1] - seen[i], lambda i: made * units[i].gradient_bytes + late[i]
    )
    gathered: Gathered = by_torch
    if stack.states is not None:
        gradients, gathered = own_gradients(0.0, loads, stack), own_gathered(plan, loads)
    line = timeline_of(loads, plan.recompute)
    forward = _fullest(forward_moments(loads, line, gradients, gathered))
    backwards = list(backward_moments(plan, loads, line, gradients, gathered))
    multiplied = sum(u.parameter_bytes * u.count * u.is_multiplied for u in loads.runs)
    cast = multiplied * share * (share != 1 and kind in WHOLE)
    own = sum(saved_bytes(unit, plan.recompute) * unit.count for unit in loads.runs)
    arrived, returned = messages
    if stack.states is not None:
        cast = arrived = returned = 0.0
    else:
        arrived -= min(own, received_bytes)
    return StageMemory(
        forward=forward._replace(gathered=forward.gathered + cast),
        backward=max(backwards, key=lambda moment: moment.total - moment.gradients)._replace(
            gradients=0.0
        ),
        first_backward=_fullest(backwards),
        saved_bytes=between_bytes(
            own, received_bytes, sent_bytes, plan, stack, message=messages[0]
        ),
        own_bytes=own,
        arrived_bytes=arrived,
        returned_bytes=returned,
        cast_bytes=cast,
        waiting_bytes=sum(unit.layer_bytes * unit.count for unit in loads.runs) * bool(messages[0]),
    )


def between_bytes(
    own: Amount,
    received: Amount,
    sent: Amount,
    plan: Plan,
    stack: Stack = TORCH,
    *,
    message: Amount,
) -> Amount:
    """Bytes that a microbatch saves in one stage, or many, between forward and backward: saved
    activations, sent outputs, and the buffers of the `message` that it received.

    In a stack with states of its own outputs are released when they were sent, unless it clones
    what it receives and holds on to what it sends.
    """
    if stack.states is None:
        taken: Amount = np.minimum(own, received)
        return own - taken + message + sent
    return own + holds_outputs(plan, stack) * (received + sent)


def message_bytes(stack: Stack) -> float:
    """Buffers of gradients in transit, of a stack with its own states."""
    return (stack.bucket_bytes or 0.0) if stack.states is not None else 0.0


def holds_outputs(plan: Plan, stack: Stack) -> bool:
    """Return True if inputs and outputs of stages stay in buffers; stacks that do so run only
    1F1B."""
    return stack.holds_outputs and plan.schedule is Schedule.ONE_F_ONE_B


def read_out_bytes(part: Loads) -> float:
    """Bytes of fp32 outputs of the last stage before its loss; 0 for other stages."""
    units = part.runs
    if len(units) < 2 or units[-1].name != LOSS:
        return 0.0
    return units[-2].output_bytes / part.compute_share


def _fullest(moments: Iterable[Moment]) -> Moment:
    return max(moments, key=lambda moment: moment.total)


def stage_peak(
    plan: Plan,
    parts: Sequence[Loads],
    chunks: Sequence[StageMemory],
    in_flight: Sequence[InFlight],
    *,
    update: Upkeep,
    device: Device,
    batch_bytes: float,
    buffer_bytes: float,
    copied_bytes: float,
    stack: Stack = TORCH,
    calibration: Calibration = CALIBRATION,
) -> Peak:
    """Peak of a step on one rank of a pipeline.

    Args:
        parts, chunks: the rank's stages, in order.
        in_flight: other microbatches' activations when its actions begin.
        update: of the rank's part of the parameters.
        batch_bytes: of the whole batch and the model's buffers, which every stage has.
        buffer_bytes: of all that the rank's stages receive of one microbatch.
        copied_bytes: this rank's copies of tied parameters that another stage counts.
    """
    shares = round_shares(plan, device, compute_share=parts[0].compute_share, stack=stack)
    parameter_bytes = sum(part.parameter_bytes for part in parts) + copied_bytes
    gradient_bytes = sum(part.gradient_bytes for part in parts) + copied_bytes
    root = sum(part.root_parameter_bytes for part in parts) + copied_bytes
    whole = shares.gradients * gradient_bytes
    each_whole = [shares.gradients * part.gradient_bytes for part in parts]
    always = shares.gathered * parameter_bytes + shares.root * root
    own, standing = None, 0.0
    if stack.states is not None:
        own = resident_states(
            stack.states,
            plan,
            parts,
            update=update,
            degree=shard_degree(plan),
            copied_bytes=copied_bytes,
            folds_experts=stack.folds_experts,
        )
        read_out = min(READ_OUT_BUFFERS, plan.microbatches) * read_out_bytes(parts[-1])
        whole, standing = own.gradients, message_bytes(stack)
        standing += (buffer_bytes + read_out) * holds_outputs(plan, stack)

    def at(moment: InFlight) -> Moment:
        chunk = chunks[moment.chunk]
        is_forward = moment.kind is PassKind.FORWARD
        during, gradients = chunk.forward if is_forward else chunk.backward, whole
        if own is None and plan.accumulation == 1 and not all(moment.has_gradients):
            if not (is_forward or moment.has_gradients[moment.chunk]):
                during = chunk.first_backward
            gradients = during.gradients + sum(compress(each_whole, moment.has_gradients))
        saved, cast, transient = during.activations, during.gathered + always, during.transient
        if is_forward:
            saved += chunk.arrived_bytes
        else:
            saved -= chunk.own_bytes  # of the current microbatch, which is among those in flight
            transient += chunk.returned_bytes
        for forwards, waiting, each in zip(moment.saved, moment.waiting, chunks, strict=True):
            saved += forwards * each.saved_bytes
            cast += forwards * each.cast_bytes
            transient += waiting * (each.waiting_bytes + each.returned_bytes)
        return Moment(during.event, during.unit, gradients, saved, cast, transient, during.loss)

    moments = [at(moment) for moment in in_flight]
    if own is None:
        moments.append(_reduction(plan, parts, whole, root=root, always=always))
    if not states_leave(plan, device):
        moments.append(optimizer_step(plan, gradient_bytes, update, device, stack=stack, own=own))
    fullest = _fullest(moments)
    return peak_at(
        fullest,
        plan,
        parameter_bytes=parameter_bytes,
        gradient_bytes=gradient_bytes,
        update=update,
        device=device,
        batch_bytes=batch_bytes,
        buffer_bytes=standing,
        unsharded_bytes=sum(part.unsharded_bytes + part.whole_bytes for part in parts),
        unsharded_gradient_bytes=sum(
            part.unsharded_bytes + part.whole_gradient_bytes for part in parts
        ),
        ahead=UNITS_WHEN_AHEAD * max(largest_copy(plan, part, stack) for part in parts),
        stack=stack,
        own=own,
        calibration=calibration,
        activation_error=parts[0].activation_error,
    )


def _reduction(
    plan: Plan, parts: Sequence[Loads], whole: float, *, root: float, always: float
) -> Moment:
    """Replicas of a stage reduce when the round ends: gradients in buckets, or group by group from
    an fp32 copy."""
    if plan.data_parallel.is_sharded:
        groups = [unit.gradient_bytes for part in parts for unit in part.separate]
        return Moment(
            event="reduction of the stage",
            gradients=whole,
            gathered=always + max([root, *groups]),
        )
    bucket = min(whole, BUCKET_BYTES) if plan.data_degree > 1 else 0.0
    return Moment(event="exchange of the stage's gradients", gradients=whole, gathered=bucket)
