"""Memory of a process: its context, its tensors, and what its allocator keeps among them.

On an accelerator that is the caching allocator's share (`advisor.cost.memory.peak`), on processors
the heap of the C library.

glibc leaves holes where tensors were freed. A tensor needs a larger hole than one of its own size,
for its alignment (malloc/malloc.c, _int_memalign), and small objects lie where the rest was, so
that a step spreads. Tensors that are mapped (`profiles.workload.new_memory`) leave no holes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from advisor.cost.breakdown import Estimate
from advisor.cost.context import CostContext
from advisor.cost.estimates.rank_step import rank_step
from engines.plan import Plan
from profiles.workload.new_memory import mapped

# Holes over the bytes of tensors that come and go in a step: about the median of 18 steps of 9
# models, 0.20 to 0.61 (`python -m tests.benchmarks.heap`); other models have had up to 1.2.
HOLES, FEWEST_HOLES, MOST_HOLES = 0.45, 0.25, 1.0


class ProcessMemory(NamedTuple):
    """Bytes that the process of the fullest rank holds at its peak, and their range."""

    nbytes: float
    low: float
    high: float


def process_memory(costs: CostContext, plan: Plan, estimate: Estimate) -> ProcessMemory:
    """Predict what `profiles.allocator.process_peak` measures of `estimate`, of `plan`."""
    low, high = estimate.peak_low_bytes, estimate.peak_high_bytes
    if costs.facts.cluster.device.kind != "cpu":
        return ProcessMemory(max(estimate.reserved_bytes, estimate.peak_bytes), low, high)
    in_heap = heap_bytes(costs, plan, estimate)
    return ProcessMemory(
        estimate.peak_bytes + HOLES * in_heap,
        low + FEWEST_HOLES * in_heap,
        high + MOST_HOLES * in_heap,
    )


def heap_bytes(costs: CostContext, plan: Plan, estimate: Estimate) -> float:
    """Bytes at the peak in tensors that come and go, but for mapped ones.

    DDP's buckets of gradients stay. Of activations and temporaries the share is that of what all
    units keep.
    """
    rank = estimate.stages[0].rank if estimate.stages else 0
    units = [unit for units in rank_step(costs, plan, rank).stages for unit in units]
    memory = estimate.memory
    saved = _heap_share((*unit.saved, *unit.again) for unit in units for _ in range(unit.count))
    moving = saved * (memory.activations + memory.transient + memory.gathered)
    if plan.is_replicated:
        return moving
    made = _heap_share(unit.gradients for unit in units for _ in range(unit.count))
    return moving + made * memory.gradients


def _heap_share(tensors: Iterable[Iterable[float]]) -> float:
    """Share of the bytes of tensors that are not mapped; all, where there are none."""
    total = in_heap = 0.0
    for nbytes in (nbytes for each in tensors for nbytes in each):
        total += nbytes
        in_heap += nbytes - mapped(nbytes)
    return in_heap / total if total else 1.0
