"""Device memory of a unit in use: gathered parameters, and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from advisor.cost.load.loads import Loads
from advisor.cost.load.unit_load import UnitLoad
from advisor.cost.memory.states import zero_level
from engines.plan import DataParallel, Plan
from profiles.model.profile import LOSS
from profiles.workload.stack import TORCH, Loss, Stack

# Gradients are sent in flat messages: the buckets of DistributedDataParallel (bucket_cap_mb=25, in
# MiB), and those of a stage's replicas (engines/data/replicas.py).
BUCKET_BYTES = 25 * 2**20

WHOLE = (DataParallel.NONE, DataParallel.THREADS, DataParallel.REPLICATE)
KEEPS_PARAMETERS = (DataParallel.ZERO1, DataParallel.ZERO2)


def shard_degree(plan: Plan) -> int:
    """Number of ranks that shard parameters and optimizer states, including those of cp.

    Context parallelism does not split parameters, so FSDP shards them over the ranks of cp too.
    """
    if plan.data_parallel in KEEPS_PARAMETERS:
        return plan.dp_replicate * plan.cp
    return plan.dp_shard * plan.cp if plan.data_parallel.is_sharded else 1


def added_share(plan: Plan) -> float:
    """Share of the gradients that a rank accumulates over microbatches: shards if they are reduced
    after each microbatch; FSDP2 reduces at the end of a pipeline's round."""
    is_reduced = plan.data_parallel.is_sharded and plan.data_parallel is not DataParallel.ZERO1
    return 1 / shard_degree(plan) if is_reduced and plan.pp == 1 else 1.0


Gathered = Callable[[int, int, bool], float]
"""Whole parameters while entry `i` works and entry `following` is fetched (-1: none); the third:
in the forward."""


def gathered_by_torch(plan: Plan, loads: Loads, stack: Stack = TORCH) -> Gathered:
    """Parameters that FSDP2 or autocast holds besides the resident ones; a chunked loss reads those
    of the head before it."""
    share, kind = loads.compute_share, plan.data_parallel
    units = loads.entries
    copies = [u.parameter_bytes * share if u.is_separate else 0.0 for u in units]
    root = loads.root_parameter_bytes * share
    seen = list(accumulate(copy * u.count for copy, u in zip(copies, units, strict=True)))
    cast = [u.parameter_bytes * u.is_multiplied * share * (share != 1) for u in units]
    repeats = [unit.runs_again(plan.recompute) for unit in units]
    in_forward = list(accumulate(c * u.count for c, u in zip(cast, units, strict=True)))
    saved = list(
        accumulate(
            c * u.count * (not again) for c, u, again in zip(cast, units, repeats, strict=True)
        )
    )

    def following_bytes(following: int) -> float:
        return copies[following] if 0 <= following < len(copies) else 0.0

    def autocast(i: int, following: int, forward: bool) -> float:
        # bf16 weight copies live from their cast in the forward to the end of the unit's backward.
        # Those of a block that runs again are in autocast's cache alone, which ends with the
        # forward, before a loss outside it; they are made again for its backward.
        if forward and units[i].name != LOSS:
            return in_forward[i]
        return saved[i] + cast[i] * repeats[i]

    def once_a_step(i: int, following: int, forward: bool) -> float:
        if plan.forwards > 1:
            return root + seen[-1]
        return root + seen[i] + (following_bytes(following) if following > i else 0.0)

    reads_head = stack.loss is Loss.CHUNKED and bool(units) and units[-1].name == LOSS

    def one_by_one(i: int, following: int, forward: bool) -> float:
        is_read = reads_head and i == len(units) - 1 and following != i - 1
        head = copies[i - 1] if is_read else 0.0
        return root + head + copies[i] + following_bytes(following)

    if kind in WHOLE:
        return autocast
    return once_a_step if kind in KEEPS_PARAMETERS else one_by_one


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients on the device before, and while, entry `i` runs its backward.

    `buffers` are temporary, `reduced` is live when the entry is done and its reduction begins;
    `carried` is the input of a microbatch's last reduction, live until the next one's first.
    """

    in_forward: float
    in_backward: Callable[[int], float]
    buffers: Callable[[int], float]
    reduced: Callable[[int], float] | None = None
    carried: float = 0.0


def reduction_share(compute_share: float, *, copies: bool) -> float:
    """Bytes in a reduction per byte of its gradients in fp32: those in the compute dtype and the
    flat input that they are copied to. gloo reduces a copy of the input, when they are gone."""
    return max(1 + compute_share, 2.0 * copies)


def gradients_of_torch(
    plan: Plan, loads: Loads, *, on_device: bool, copies: bool = False
) -> Gradients:
    """Gradient memory by data-parallel kind; `on_device` False means shards go to the host.

    `copies`: collectives copy their input (gloo).

    DDP's gradients live in its buckets from the start (gradient_as_bucket_view); microbatches
    before the last accumulate outside them, so with several there are two copies. Otherwise they
    are allocated unit by unit, and all exist after the first microbatch. ZeRO-1 accumulates whole
    gradients until the last microbatch; the other sharded kinds keep reduced shards.
    """
    kind, several = plan.data_parallel, plan.forwards > 1
    share, degree = loads.compute_share, shard_degree(plan)
    units = loads.entries
    own = [unit.gradient_bytes for unit in units]
    total = loads.gradient_bytes
    seen = list(accumulate(unit.gradient_bytes * unit.count for unit in units))
    after = [total - so_far + mine for so_far, mine in zip(seen, own, strict=True)]
    if kind not in WHOLE:
        # The backward's result, besides the fp32 input of the previous reduction, which FSDP2 holds
        # until the unit is done. The root group's gradients stay unsharded until the end of the
        # backward, and so do late units.
        inputs = [unit.gradient_bytes * unit.is_separate for unit in units]
        carried = (
            next(filter(None, inputs), 0.0) if several and kind is not DataParallel.ZERO1 else 0.0
        )
        working, previous = [0.0] * len(units), carried
        for i in reversed(range(len(units))):
            working[i] = share * inputs[i] + previous
            previous = previous if units[i].is_late else inputs[i] or previous
        flat = reduction_share(share, copies=copies)
        reduced = [flat * mine for mine in inputs]
        # A shard is added to those of earlier microbatches. The first of two under ZeRO-2 has none
        # yet, and all parameters, some of which the second has released.
        adds = plan.forwards > 1 + (kind is DataParallel.ZERO2)
        made = adds / degree * on_device
        root = share * loads.root_gradient_bytes
        keeps_all = kind in KEEPS_PARAMETERS and several
        late = late_bytes(units, share, with_parameters=not keeps_all)
        shards = [nbytes - of_late for nbytes, of_late in zip(after, _of_late(units), strict=True)]
        if kind is DataParallel.ZERO1 and several:
            return Gradients(total, lambda i: total, lambda i: working[i], lambda i: reduced[i])
        shard_share = 1 / degree if on_device else 0.0
        return Gradients(
            total * shard_share if several else 0.0,
            lambda i: (total if several else shards[i]) * shard_share,
            lambda i: working[i] + root + late[i],
            lambda i: reduced[i] + made * inputs[i] + root + late[i],
            carried,
        )
    if plan.is_replicated:
        # Autograd allocates a gradient, then copies it into its bucket.
        total_bytes = 2 * total if several else total
        return Gradients(total_bytes, lambda i: total_bytes, lambda i: own[i])
    return Gradients(
        total if several else 0.0,
        lambda i: total if several else after[i],
        lambda i: own[i] if several else 0.0,
    )


def _of_late(units: Sequence[UnitLoad]) -> list[float]:
    """Gradients of late units from each entry on, which have no shards yet."""
    own = [unit.gradient_bytes * unit.count * unit.is_late for unit in units]
    return list(accumulate(reversed(own)))[::-1]


def late_bytes(
    units: Sequence[UnitLoad],
    share: float,
    *,
    with_parameters: bool = True,
    with_gradients: bool = True,
) -> list[float]:
    """Bytes of late units whose backward is over when that of each entry runs."""
    after, so_far = [0.0] * len(units), 0.0
    for i in reversed(range(len(units))):
        after[i] = so_far
        unit = units[i]
        nbytes = with_parameters * unit.parameter_bytes + with_gradients * unit.gradient_bytes
        so_far += share * nbytes * unit.count * unit.is_late
    return after


def own_gradients(buffer_bytes: float, loads: Loads, stack: Stack) -> Gradients:
    """Gradients in a stack's own buffers; a product writes each in the compute dtype before it is
    accumulated, unless the kernel accumulates."""
    units = loads.entries
    made = 0.0 if stack.accumulates_in_product else loads.compute_share
    return Gradients(buffer_bytes, lambda i: buffer_bytes, lambda i: made * units[i].gradient_bytes)


def own_gathered(plan: Plan, loads: Loads) -> Gathered:
    """Gathered weights live only during their unit: under ZeRO-3, with the next one's."""
    units = loads.entries
    share = loads.compute_share * (zero_level(plan) == 3)
    copies = [share * unit.parameter_bytes * unit.is_separate for unit in units]
    root = share * loads.root_parameter_bytes

    def whole(i: int, following: int, forward: bool) -> float:
        return root + copies[i] + (copies[following] if 0 <= following < len(copies) else 0.0)

    return whole
