"""Memory as a timeline: every moment of a step in order, and the fullest of them.

Moments: the forward of each unit, the loss, the backward of each unit in reverse and the reduction
of its gradients, the reduction of the root group, the optimizer step. Each is a sum of what lives
then, so the peak is a real moment and not a sum of maxima.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from advisor.cost.breakdown import Memory
from advisor.cost.loads import Loads, UnitLoad, describe
from engines.plan import DataParallel, Offload, Plan, Recompute
from profiles.cluster import Device
from profiles.model import LOSS
from profiles.optimizers import Upkeep

# What the allocator holds over what is allocated: 1.08 to 1.10 in Mist's README. The upper end is
# charged to the upper end of the range, the estimate itself carries none.
ALLOCATOR_SLACK = 0.10
# Activations are counted operation by operation on fake tensors. What is not seen there is the
# kernels' own scratch memory; published peaks of one configuration scatter by less than 0.1 %, so
# the range is this model's own doubt, not noise. Assumed until runs of our own bound it.
ACTIVATION_ERROR = 0.08
# FSDP2 holds a gathered unit, its flat gather buffer and the unit prefetched next. Two whole units
# is what its streams allow when the host does not run ahead, three when it does.
UNITS_WHEN_AHEAD = 1

_WHOLE = (DataParallel.NONE, DataParallel.THREADS, DataParallel.REPLICATE)
_KEEPS_PARAMETERS = (DataParallel.ZERO1, DataParallel.ZERO2)


@dataclass(frozen=True, slots=True)
class Moment:
    """What lives at one point of a step, in bytes, beside what always lives.

    `loss` says how much of it is the loss's, at the moments that are its own.
    """

    phase: str
    gradients: float = 0.0
    activations: float = 0.0
    gathered: float = 0.0
    transient: float = 0.0
    loss: float = 0.0

    @property
    def total(self) -> float:
        return self.gradients + self.activations + self.gathered + self.transient


@dataclass(frozen=True, slots=True)
class Peak:
    """The fullest moment, with its range. `host_bytes` is what one rank keeps in main memory."""

    memory: Memory
    phase: str
    low_bytes: float
    high_bytes: float
    states_bytes: float
    host_bytes: float
    loss_bytes: float


def shard_degree(plan: Plan) -> int:
    """Over how many ranks parameters and optimizer states are divided."""
    if plan.data_parallel in _KEEPS_PARAMETERS:
        return plan.dp_replicate
    return plan.dp_shard


def peak(
    plan: Plan,
    loads: Loads,
    *,
    update: Upkeep,
    device: Device,
    batch_bytes: float,
) -> Peak:
    """The fullest moment of a step under `plan` on one rank.

    `update` is of the rank's part of the parameters. `batch_bytes` is the rank's whole part of the
    batch: it is on the device for the whole step.
    """
    degree = shard_degree(plan)
    parameters = loads.parameter_bytes / degree
    gradients = loads.gradient_bytes / degree
    states = update.state_bytes
    held = parameters + gradients + states
    offloaded = plan.offload is Offload.STATES and device.kind != "cpu"

    gradients_of = _gradients(plan, loads, on_device=not offloaded)
    moments = [
        *_forward(plan, loads, gradients_of),
        *_backward(plan, loads, gradients_of),
        *_root_reduction(plan, loads, gradients_of),
    ]
    if not offloaded:
        moments.append(_optimizer_step(plan, loads, update, device))
    fullest = max(moments, key=lambda moment: moment.total)

    memory = Memory(
        parameters=0.0 if offloaded else parameters,
        gradients=fullest.gradients,
        optimizer=0.0 if offloaded else states,
        activations=fullest.activations,
        gathered=fullest.gathered,
        transient=fullest.transient,
        batch=batch_bytes + loads.buffer_bytes,
        context=device.context_bytes.value,
    )
    allocated = memory.total - memory.context
    doubt = ACTIVATION_ERROR * (memory.activations + memory.transient)
    ahead = UNITS_WHEN_AHEAD * _largest_copy(plan, loads)
    return Peak(
        memory=memory,
        phase=fullest.phase,
        low_bytes=allocated - doubt + device.context_bytes.low,
        high_bytes=(allocated + doubt + ahead) * (1 + ALLOCATOR_SLACK) + device.context_bytes.high,
        states_bytes=held,
        host_bytes=held if offloaded else 0.0,
        loss_bytes=fullest.loss,
    )


def _largest_copy(plan: Plan, loads: Loads) -> float:
    if not plan.data_parallel.is_sharded:
        return 0.0
    return max((u.parameter_bytes for u in loads.separate), default=0.0) * loads.compute_share


def _kept(unit: UnitLoad, recompute: Recompute) -> float:
    """Bytes that stay from the unit's forward to its backward."""
    if not unit.is_block or recompute is Recompute.NONE:
        return unit.activation_bytes
    return unit.input_bytes if recompute is Recompute.FULL else unit.selective_bytes


def _gathered(plan: Plan, loads: Loads) -> Callable[[int, int], float]:
    """Whole parameters while unit `i` works and unit `following` is fetched (-1: none)."""
    share, kind = loads.compute_share, plan.data_parallel
    copies = [u.parameter_bytes * share if u.is_separate else 0.0 for u in loads.units]
    root = loads.root_parameter_bytes * share
    seen = list(accumulate(copies))
    cast = list(accumulate(u.parameter_bytes * share * (share != 1) for u in loads.units))

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
    """Gradients held by the device before, and while, unit `i` runs its backward.

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
    own = [unit.gradient_bytes for unit in loads.units]
    total = sum(own)
    after = [total - seen + mine for seen, mine in zip(accumulate(own), own, strict=True)]
    if kind not in _WHOLE:
        # What backward makes of a unit, beside the fp32 input of the reduction before it, which
        # FSDP2 holds until the unit is done; then its own. The root group's gradients wait whole
        # for the end of the backward.
        before = _next_separate(loads, backward=False)
        inputs = [unit.gradient_bytes * unit.is_separate for unit in loads.units]
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


def _next_separate(loads: Loads, *, backward: bool) -> list[int]:
    """For each unit, the one that is prefetched while it works; -1 for none."""
    order = range(len(loads.units))
    found, latest = [-1] * len(loads.units), -1
    for i in order if backward else reversed(order):
        found[i] = latest
        if loads.units[i].is_separate:
            latest = i
    return found


def _forward(plan: Plan, loads: Loads, gradients: _Gradients) -> Iterator[Moment]:
    gathered, following = _gathered(plan, loads), _next_separate(loads, backward=False)
    before = 0.0
    for i, unit in enumerate(loads.units):
        work = unit.input_bytes + unit.forward_transient_bytes
        yield Moment(
            phase=f"forward of {describe(unit)}",
            gradients=gradients.in_forward,
            activations=before,
            gathered=gathered(i, following[i]) + gradients.carried,
            transient=work,
            loss=work * (unit.name == LOSS),
        )
        before += _kept(unit, plan.recompute)


def _backward(plan: Plan, loads: Loads, gradients: _Gradients) -> Iterator[Moment]:
    """Each unit's backward with the forward that recompute runs before it, and its reduction."""
    gathered, following = _gathered(plan, loads), _next_separate(loads, backward=True)
    kept = [_kept(unit, plan.recompute) for unit in loads.units]
    live = sum(kept)
    for i in reversed(range(len(loads.units))):
        unit = loads.units[i]
        runs_again = unit.is_block and plan.recompute is not Recompute.NONE
        # A block that is computed again has all its activations while its backward runs.
        again = max(0.0, unit.activation_bytes - kept[i]) if runs_again else 0.0
        work = again + unit.backward_transient_bytes
        if runs_again:
            work = max(work, unit.forward_transient_bytes)
        yield Moment(
            phase=f"backward of {describe(unit)}",
            gradients=gradients.in_backward(i),
            activations=live,
            gathered=gathered(i, following[i]) + gradients.buffers(i),
            transient=unit.output_bytes + work,
            loss=(kept[i] + unit.output_bytes + work) * (unit.name == LOSS),
        )
        live -= kept[i]
        if gradients.reduced is not None and unit.is_separate:
            freed = 0.0 if plan.data_parallel in _KEEPS_PARAMETERS else unit.parameter_bytes
            yield Moment(
                phase=f"reduction of {describe(unit)}",
                gradients=gradients.in_backward(i),
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
        phase="reduction of the root group",
        gradients=gradients.in_backward(0),
        gathered=share * loads.root_parameter_bytes + (1 + share) * loads.root_gradient_bytes,
    )


def _optimizer_step(plan: Plan, loads: Loads, update: Upkeep, device: Device) -> Moment:
    """The update's temporaries.

    torch's default on accelerators is foreach: for Adam one list of tensors as large as all local
    parameters (`_foreach_sqrt` in torch/optim/adam.py). On the CPU it goes tensor by tensor.
    """
    return Moment(
        phase=f"{update.name} step",
        gradients=loads.gradient_bytes / shard_degree(plan),
        transient=update.loop_bytes if device.kind == "cpu" else update.list_bytes,
    )
