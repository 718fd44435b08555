"""Communication that a stack does not overlap with compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from advisor.cost.communication.exchange import Exchange
from advisor.cost.compute.unit_times import Computing
from engines.plan import DataParallel, Plan
from profiles.workload.optimizer_states import FP32_BYTES
from profiles.workload.stack import Stack


def reduced_share(stack: Stack) -> float:
    """Bytes sent between replicas per byte of gradient as built."""
    wanted = stack.reduce_bytes
    if wanted is None and stack.states is not None:
        wanted = stack.states.gradient
    return 1.0 if wanted is None else wanted / FP32_BYTES


def split_exposed(
    stack: Stack, plan: Plan, exchanged: Exchange, computing: Computing
) -> tuple[Exchange, float]:
    """Split `exchanged` into the part that `stack` overlaps, and the seconds of exposed gradients
    and parameters, sent after compute."""
    waited, counts = 0.0, [time.count for time in computing.times]
    zeros = (0.0,) * len(counts)

    def of_all(each: Sequence[float]) -> float:
        return sum(n * s for n, s in zip(counts, each, strict=True))

    if not stack.overlap_gradients:
        every = plan.data_parallel.is_sharded and plan.data_parallel is not DataParallel.ZERO1
        rounds = plan.forwards if every else 1
        waited += rounds * (of_all(exchanged.reduce_s) + exchanged.root_reduce_s)
        waited += of_all(exchanged.replicate_s) + exchanged.root_replicate_s
        exchanged = replace(
            exchanged,
            reduce_s=zeros,
            replicate_s=zeros,
            root_reduce_s=0.0,
            root_replicate_s=0.0,
        )
    if not stack.overlap_parameters and plan.data_parallel is DataParallel.ZERO1:
        waited += of_all(exchanged.gather_s) + exchanged.root_gather_s
        exchanged = replace(exchanged, gather_s=zeros, root_gather_s=0.0)
    return exchanged, waited


def overlaps_gathers(stack: Stack) -> bool:
    """Return True if parameters gathered for the whole step overlap with its first forwards."""
    return stack.states is None or stack.overlap_parameters


def gathers_s(stack: Stack, ranks: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Seconds that the first forwards of a pipeline's step wait for gathered parameters.

    FSDP2 gathers a stage when its forward begins: the first microbatch waits at every stage. Stacks
    with states of their own gather on all ranks from the beginning of the step, overlapped with the
    forwards of a rank's earlier stages if they overlap gathers.

    Args:
        ranks: (seconds of its forward, exposed seconds of its gather) of each stage of each rank.
    """
    if stack.states is None:
        return sum(gather for stages in ranks for _, gather in stages)
    worst = 0.0
    for (forward, first), *rest in ranks:
        hidden = forward + sum(later for later, _ in rest[:-1])
        gathers = sum(gather for _, gather in rest)
        worst = max(worst, first + max(0.0, gathers - hidden * overlaps_gathers(stack)))
    return worst
