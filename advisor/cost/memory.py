"""Memory as a timeline: every moment of a step in order, and the fullest of them.

Moments: the forward of each unit, the loss, the backward of each unit in reverse and the reduction
of its gradients, the reduction of the root group, the optimizer step. Each is a sum of what lives
then, so the peak is a real moment and not a sum of maxima. On a stage of a pipeline the activations
of other microbatches live beside it, as many as its schedule has in flight at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from advisor.cost.breakdown import Memory
from advisor.cost.loads import Loads, UnitLoad, describe
from advisor.cost.orders import Kind
from advisor.cost.orders import Moment as InFlight
from engines.plan import DataParallel, Offload, Plan, Recompute
from profiles.cluster import Device
from profiles.model import LOSS
from profiles.optimizers import Upkeep

# What the allocator holds over what is allocated: 1.08 to 1.10 in Mist's README. The upper end is
# charged to the upper end of the range, the estimate itself carries none; the middle makes what is
# reserved of what is allocated.
ALLOCATOR_SLACK = 0.10
USUAL_SLACK = 0.09
# Activations are counted operation by operation on fake tensors. What is not seen there is the
# kernels' own scratch memory; published peaks of one configuration scatter by less than 0.1 %, so
# the range is this model's own doubt, not noise. Assumed until runs of our own bound it.
ACTIVATION_ERROR = 0.08
# FSDP2 holds a gathered unit, its flat gather buffer and the unit prefetched next. Two whole units
# is what its streams allow when the host does not run ahead, three when it does.
UNITS_WHEN_AHEAD = 1
# The replicas of a stage average gradients in flat messages (engines/replicas.py).
BUCKET_BYTES = 25 * 2**20

_WHOLE = (DataParallel.NONE, DataParallel.THREADS, DataParallel.REPLICATE)
_KEEPS_PARAMETERS = (DataParallel.ZERO1, DataParallel.ZERO2)


@dataclass(frozen=True, slots=True)
class Moment:
    """What lives at one point of a step, in bytes, beside what always lives.

    `loss` says how much of it is the loss's, at the moments that are its own.
    """

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
    """The fullest moment, with its range. `host_bytes` is what one rank keeps in main memory."""

    memory: Memory
    phase: str
    low_bytes: float
    high_bytes: float
    reserved_bytes: float
    states_bytes: float
    host_bytes: float
    loss_bytes: float


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stage of a pipeline, or the whole model, while one microbatch is in it.

    Attributes:
        forward, backward: the fullest moments, beside what other microbatches hold.
        kept_bytes: what a microbatch holds between its forward and its backward: activations, and
            what is sent on.
        own_bytes: the activations among them.
        cast_bytes: copies of the weights that autocast made, which it holds as well.
        waiting_bytes: gradients between layers, where those of the weights come later.
    """

    forward: Moment
    backward: Moment
    kept_bytes: float
    own_bytes: float
    cast_bytes: float
    waiting_bytes: float


def shard_degree(plan: Plan) -> int:
    """Over how many ranks parameters and optimizer states are divided; those of cp hold parts too.

    Context parallelism leaves parameters alone, so its ranks share in what is sharded.
    """
    if plan.data_parallel in _KEEPS_PARAMETERS:
        return plan.dp_replicate * plan.cp
    return plan.dp_shard * plan.cp if plan.data_parallel.is_sharded else 1


def peak(
    plan: Plan,
    loads: Loads,
    *,
    update: Upkeep,
    device: Device,
    batch_bytes: float,
) -> Peak:
    """The fullest moment of a step under `plan` on one rank that has the whole model.

    `update` is of the rank's part of the parameters. `batch_bytes` is the rank's whole part of the
    batch: it is on the device for the whole step.
    """
    on_device = not is_offloaded(plan, device)
    gradients = _gradients(plan, loads, on_device=on_device)
    moments = [
        *_forward(plan, loads, gradients, _gathered(plan, loads)),
        *_backward(plan, loads, gradients, _gathered(plan, loads)),
        *_root_reduction(plan, loads, gradients),
    ]
    if on_device:
        moments.append(_optimizer_step(plan, loads.gradient_bytes, update, device))
    fullest = max(moments, key=lambda moment: moment.total)
    return _peak_at(
        fullest,
        plan,
        parameter_bytes=loads.parameter_bytes,
        gradient_bytes=loads.gradient_bytes,
        update=update,
        device=device,
        batch_bytes=batch_bytes + loads.buffer_bytes,
        ahead=UNITS_WHEN_AHEAD * _largest_copy(plan, loads),
    )


def is_offloaded(plan: Plan, device: Device) -> bool:
    """Whether states live in main memory; a processor's are there anyway."""
    return plan.offload is Offload.STATES and device.kind != "cpu"


def _peak_at(
    fullest: Moment,
    plan: Plan,
    *,
    parameter_bytes: float,
    gradient_bytes: float,
    update: Upkeep,
    device: Device,
    batch_bytes: float,
    ahead: float,
    buffer_bytes: float = 0.0,
) -> Peak:
    """`fullest` beside what always lives, with its range; `ahead` is what a host that runs ahead
    gathers besides."""
    degree, offloaded = shard_degree(plan), is_offloaded(plan, device)
    parameters, states = parameter_bytes / degree, update.state_bytes
    held = parameters + gradient_bytes / degree + states
    memory = Memory(
        parameters=0.0 if offloaded else parameters,
        gradients=fullest.gradients,
        optimizer=0.0 if offloaded else states,
        activations=fullest.activations,
        gathered=fullest.gathered,
        transient=fullest.transient,
        batch=batch_bytes,
        transfers=buffer_bytes,
        context=device.context_bytes.value,
    )
    allocated = memory.total - memory.context
    doubt = ACTIVATION_ERROR * (memory.activations + memory.transient)
    slack = USUAL_SLACK if device.kind != "cpu" else 0.0
    return Peak(
        memory=memory,
        phase=fullest.phase,
        low_bytes=allocated - doubt + device.context_bytes.low,
        high_bytes=(allocated + doubt + ahead) * (1 + ALLOCATOR_SLACK) + device.context_bytes.high,
        reserved_bytes=allocated * (1 + slack) + memory.context,
        states_bytes=held,
        host_bytes=held if offloaded else 0.0,
        loss_bytes=fullest.loss,
    )


def _largest_copy(plan: Plan, loads: Loads) -> float:
    if not plan.data_parallel.is_sharded:
        return 0.0
    return max((u.parameter_bytes for u in loads.separate), default=0.0) * loads.compute_share


def kept_bytes(unit: UnitLoad, recompute: Recompute) -> float:
    """Bytes that stay from the unit's forward to its backward."""
    if not unit.is_block or recompute is Recompute.NONE:
        return unit.activation_bytes
    return unit.input_bytes if recompute is Recompute.FULL else unit.selective_bytes


Gathered = Callable[[int, int], float]
"""Whole parameters while entry `i` works and entry `following` is fetched (-1: none)."""


def _gathered(plan: Plan, loads: Loads) -> Gathered:
    share, kind = loads.compute_share, plan.data_parallel
    units = loads.entries
    copies = [u.parameter_bytes * share if u.is_separate else 0.0 for u in units]
    root = loads.root_parameter_bytes * share
    seen = list(accumulate(copy * u.count for copy, u in zip(copies, units, strict=True)))
    cast = list(accumulate(u.parameter_bytes * share * (share != 1) * u.count for u in units))

    def following_bytes(following: int) -> float:
        return copies[following] if 0 <= following < len(copies) else 0.0

    def autocast(i: int, following: int) -> float:
        # bf16 copies of the weights live from their cast in the forward until the backward of the
        # unit is done; between forward and backward all of them do.
        return cast[i]

    def kept(i: int, following: int) -> float:
        if plan.forwards > 1:
            return root + seen[-1]
        return root + seen[i] + (following_bytes(following) if following > i else 0.0)

    def one_by_one(i: int, following: int) -> float:
        return root + copies[i] + following_bytes(following)

    if kind in _WHOLE:
        return autocast
    return kept if kind in _KEEPS_PARAMETERS else one_by_one


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Gradients held by the device before, and while, entry `i` runs its backward.

    `buffers` are beside them while it runs, `reduced` when it is done and its reduction begins;
    `carried` is the input of a microbatch's last reduction, held until the next one's first.
    """

    in_forward: float
    in_backward: Callable[[int], float]
    buffers: Callable[[int], float]
    reduced: Callable[[int], float] | None = None
    carried: float = 0.0


def _gradients(plan: Plan, loads: Loads, *, on_device: bool) -> _Gradients:
    """Where gradients are, by data-parallel kind; `on_device` False means shards go to the host.

    DDP's live in its buckets from the start (gradient_as_bucket_view); microbatches before the last
    add up outside them, so with several there are two of each. Otherwise they appear unit by unit,
    and after the first microbatch they are all there. ZeRO-1 adds up whole gradients until the last
    microbatch; the other sharded kinds keep the reduced shards.
    """
    kind, several = plan.data_parallel, plan.forwards > 1
    share, degree = loads.compute_share, shard_degree(plan)
    units = loads.entries
    own = [unit.gradient_bytes for unit in units]
    total = loads.gradient_bytes
    seen = list(accumulate(unit.gradient_bytes * unit.count for unit in units))
    after = [total - so_far + mine for so_far, mine in zip(seen, own, strict=True)]
    if kind not in _WHOLE:
        # What backward makes of a unit, beside the fp32 input of the reduction before it, which
        # FSDP2 holds until the unit is done; then its own. The root group's gradients wait whole
        # for the end of the backward.
        before = _next_separate(units, backward=False)
        inputs = [unit.gradient_bytes * unit.is_separate for unit in units]
        carried = (
            next(filter(None, inputs), 0.0) if several and kind is not DataParallel.ZERO1 else 0.0
        )
        working = [
            share * mine + (inputs[last] if last >= 0 else carried)
            for mine, last in zip(inputs, before, strict=True)
        ]
        reduced = [share * mine + mine for mine in inputs]
        waiting = share * loads.root_gradient_bytes
        if kind is DataParallel.ZERO1 and several:
            return _Gradients(total, lambda i: total, lambda i: working[i], lambda i: reduced[i])
        kept = 1 / degree if on_device else 0.0
        return _Gradients(
            total * kept if several else 0.0,
            lambda i: (total if several else after[i]) * kept,
            lambda i: working[i] + waiting,
            lambda i: reduced[i] + waiting,
            carried,
        )
    if kind is DataParallel.REPLICATE:
        # Autograd makes a gradient, then it is copied into its bucket.
        held = 2 * total if several else total
        return _Gradients(held, lambda i: held, lambda i: own[i])
    return _Gradients(
        total if several else 0.0,
        lambda i: total if several else after[i],
        lambda i: own[i] if several else 0.0,
    )


def _next_separate(units: Sequence[UnitLoad], *, backward: bool) -> list[int]:
    """For each entry, the one that is prefetched while it works; -1 for none."""
    order = range(len(units))
    found, latest = [-1] * len(units), -1
    for i in order if backward else reversed(order):
        found[i] = latest
        if units[i].is_separate:
            latest = i
    return found


def _forward(
    plan: Plan, loads: Loads, gradients: _Gradients, gathered: Gathered
) -> Iterator[Moment]:
    following = _next_separate(loads.entries, backward=False)
    before = 0.0
    for i, unit in enumerate(loads.entries):
        if unit.count == 1:
            work = unit.input_bytes + unit.forward_transient_bytes
            yield Moment(
                event="forward",
                unit=unit.name,
                gradients=gradients.in_forward,
                activations=before,
                gathered=gathered(i, following[i]) + gradients.carried,
                transient=work,
                loss=work * (unit.name == LOSS),
            )
        before += kept_bytes(unit, plan.recompute) * unit.count


def _backward(
    plan: Plan, loads: Loads, gradients: _Gradients, gathered: Gathered
) -> Iterator[Moment]:
    """Each unit's backward with the forward that recompute runs before it, and its reduction."""
    units = loads.entries
    following = _next_separate(units, backward=True)
    kept = [kept_bytes(unit, plan.recompute) for unit in units]
    live = sum(mine * unit.count for mine, unit in zip(kept, units, strict=True))
    for i in reversed(range(len(units))):
        unit = units[i]
        if unit.count > 1:
            live -= kept[i] * unit.count
            continue
        runs_again = unit.is_block and plan.recompute is not Recompute.NONE
        # A block that is computed again has all its activations while its backward runs.
        again = max(0.0, unit.activation_bytes - kept[i]) if runs_again else 0.0
        work = again + unit.backward_transient_bytes
        if runs_again:
            work = max(work, unit.forward_transient_bytes)
        held = gradients.in_backward(i)
        yield Moment(
            event="backward",
            unit=unit.name,
            gradients=held,
            activations=live,
            gathered=gathered(i, following[i]) + gradients.buffers(i),
            transient=unit.output_bytes + work,
            loss=(kept[i] + unit.output_bytes + work) * (unit.name == LOSS),
        )
        live -= kept[i]
        if gradients.reduced is not None and unit.is_separate:
            freed = 0.0 if plan.data_parallel in _KEEPS_PARAMETERS else unit.parameter_bytes
            yield Moment(
                event="reduction",
                unit=unit.name,
                gradients=held,
                activations=live,
                gathered=gathered(i, following[i])
                - freed * loads.compute_share
                + gradients.reduced(i),
                transient=unit.input_bytes,
            )


def _root_reduction(plan: Plan, loads: Loads, gradients: _Gradients) -> Iterator[Moment]:
    """The root group is reduced as one tensor when the backward is over."""
    if not plan.data_parallel.is_sharded:
        return
    share = loads.compute_share
    yield Moment(
        event="reduction of the root group",
        gradients=gradients.in_backward(0),
        gathered=share * loads.root_parameter_bytes + (1 + share) * loads.root_gradient_bytes,
    )


def _optimizer_step(plan: Plan, gradient_bytes: float, update: Upkeep, device: Device) -> Moment:
    """The update's temporaries.

    torch's default on accelerators is foreach: for Adam one list of tensors as large as all local
    parameters (`_foreach_sqrt` in torch/optim/adam.py). On the CPU it goes tensor by tensor.
    """
    return Moment(
        event=f"{update.name} step",
        gradients=gradient_bytes / shard_degree(plan),
        transient=update.loop_bytes if device.kind == "cpu" else update.list_bytes,
    )


def chunk_of(plan: Plan, loads: Loads, *, sent_bytes: float) -> Chunk:
    """The units of `loads` as one stage of `plan`.

    Gradients are whole until a round is over, and so are the parameters that ZeRO-1 and ZeRO-2
    gather: both are the rank's, not the stage's (see `stage_peak`).

    Args:
        sent_bytes: of one microbatch, over the border after the stage.
    """
    share, kind = loads.compute_share, plan.data_parallel
    units = loads.entries
    one_by_one = kind.is_sharded and kind not in _KEEPS_PARAMETERS
    copies = [u.parameter_bytes * share * (one_by_one and u.is_separate) for u in units]

    def gathered(i: int, following: int) -> float:
        return copies[i] + (copies[following] if 0 <= following < len(copies) else 0.0)

    # Of every unit a new gradient is made before it is added to that of other microbatches.
    made = share if kind.is_sharded else 1.0
    gradients = _Gradients(0.0, lambda i: 0.0, lambda i: made * units[i].gradient_bytes)
    forward = max(_forward(plan, loads, gradients, gathered), key=lambda moment: moment.total)
    backward = max(_backward(plan, loads, gradients, gathered), key=lambda moment: moment.total)
    cast = loads.parameter_bytes * share * (share != 1 and kind in _WHOLE)
    own = sum(kept_bytes(unit, plan.recompute) * unit.count for unit in loads.runs)
    return Chunk(
        forward=replace(forward, gathered=forward.gathered + cast),
        backward=backward,
        kept_bytes=own + sent_bytes,
        own_bytes=own,
        cast_bytes=cast,
        waiting_bytes=sum(unit.layer_bytes * unit.count for unit in loads.runs),
    )


def stage_peak(
    plan: Plan,
    parts: Sequence[Loads],
    chunks: Sequence[Chunk],
    in_flight: Sequence[InFlight],
    *,
    update: Upkeep,
    device: Device,
    batch_bytes: float,
    buffer_bytes: float,
    copied_bytes: float,
) -> Peak:
    """The fullest moment of a step on one rank of a pipeline.

    Args:
        parts, chunks: the rank's stages, in order.
        in_flight: what it holds of other microbatches when its actions begin.
        update: of the rank's part of the parameters.
        batch_bytes: every stage is given the whole batch, and the model's buffers.
        buffer_bytes: what is received is received into, for all microbatches of a round.
        copied_bytes: parameters that another stage counts, and this one holds a copy of.
    """
    kind, on_device = plan.data_parallel, not is_offloaded(plan, device)
    share, degree = parts[0].compute_share, shard_degree(plan)
    parameter_bytes = sum(part.parameter_bytes for part in parts) + copied_bytes
    gradient_bytes = sum(part.gradient_bytes for part in parts) + copied_bytes
    root = sum(part.root_parameter_bytes for part in parts) + copied_bytes
    whole = gradient_bytes
    if kind.is_sharded and plan.accumulation > 1 and kind is not DataParallel.ZERO1 and on_device:
        whole += gradient_bytes / degree  # of the rounds before
    always = 0.0
    if kind in _KEEPS_PARAMETERS:
        always = parameter_bytes * share
    elif kind.is_sharded:
        always = root * share

    def at(moment: InFlight) -> Moment:
        chunk = chunks[moment.chunk]
        is_forward = moment.kind is Kind.FORWARD
        own = chunk.forward if is_forward else chunk.backward
        kept, cast, waiting = own.activations, own.gathered + always, own.transient
        if not is_forward:
            kept -= chunk.own_bytes  # of the microbatch in work, which is among those held
        for held, late, each in zip(moment.held, moment.waiting, chunks, strict=True):
            kept += held * each.kept_bytes
            cast += held * each.cast_bytes
            waiting += late * each.waiting_bytes
        return Moment(own.event, own.unit, whole, kept, cast, waiting, own.loss)

    moments = [at(moment) for moment in in_flight]
    moments.append(_meeting(plan, parts, whole, root=root, always=always))
    if on_device:
        moments.append(_optimizer_step(plan, gradient_bytes, update, device))
    fullest = max(moments, key=lambda moment: moment.total)
    return _peak_at(
        fullest,
        plan,
        parameter_bytes=parameter_bytes,
        gradient_bytes=gradient_bytes,
        update=update,
        device=device,
        batch_bytes=batch_bytes,
        buffer_bytes=buffer_bytes,
        ahead=UNITS_WHEN_AHEAD * max(_largest_copy(plan, part) for part in parts),
    )


def _meeting(
    plan: Plan, parts: Sequence[Loads], whole: float, *, root: float, always: float
) -> Moment:
    """The replicas of a stage meet when the round is over: gradients go by buckets, or are reduced
    group by group from an fp32 copy."""
    if plan.data_parallel.is_sharded:
        groups = [unit.gradient_bytes for part in parts for unit in part.separate]
        return Moment(
            event="reduction of the stage",
            gradients=whole,
            gathered=always + max([root, *groups]),
        )
    bucket = min(whole, BUCKET_BYTES) if plan.data_degree > 1 else 0.0
    return Moment(event="exchange of the stage's gradients", gradients=whole, gathered=bucket)
