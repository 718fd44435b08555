"""Lower bounds of time and memory for all rows at once.

Every formula leaves out terms of the estimate and adds none. Rows that share a microbatch (size,
recompute, tp, numerics) share the cost model's sums over the model's units; the rest is arithmetic
on columns. Of a mixture of experts most rows exceed memory with their parameters, gradients and
states alone, which depend on the degrees: their bounds stay rough until they are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from advisor.cost.memory.allocator import upper_end
from advisor.inputs.policy import Policy
from advisor.search.cache import SearchCache
from advisor.search.columns import ROUNDING, Columns, Microbatches, some_of_each, unique
from advisor.search.space import Floats, Space
from advisor.search.staged import average_peak_bytes, staged_peak_bytes, staged_time
from advisor.search.whole import moved_s, whole_time
from advisor.search.whole_peak import whole_peak_bytes
from engines.plan import Offload

_PARTS = ("compute_s", "recompute_s", "optimizer_s", "launch_s", "exposed_s")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds of each row's estimate.

    Attributes:
        step_s, fitting_s: of the step; if the row fits.
        peak_high_bytes: of the upper end of the peak; where it `is_rough`, one that exceeds memory
            and can be raised (see `staged_peaks`).
        settling_s, besides_s: as `StagedTime`'s, with the host's overhead; zeros without stages.
    """

    step_s: Floats
    fitting_s: Floats
    peak_high_bytes: Floats
    settling_s: Floats
    besides_s: Floats
    is_rough: NDArray[np.bool_]


def bounds_of(space: Space, cache: SearchCache, policy: Policy) -> Bounds:
    """Bounds of every row of `space`; of memory alone for rows that do not fit."""
    count = len(space)
    facts = cache.costs.facts
    device, overhead_s = facts.cluster.device, facts.workload.host_overhead_s
    usable = policy.usable_bytes(device)
    microbatches = Microbatches(space, cache)
    step_s, fitting_s, peak_bytes, settling_s, besides_s = (np.zeros(count) for _ in range(5))
    is_rough = np.zeros(count, dtype=bool)
    bounds = Bounds(step_s, fitting_s, peak_bytes, settling_s, besides_s, is_rough)
    for is_whole in (True, False):
        rows = np.flatnonzero((space.pp == 1) == is_whole)
        if not len(rows):
            continue
        if is_whole:
            columns = Columns(space.part(rows), microbatches, for_memory=True)
            peak = np.maximum(whole_peak_bytes(columns, usable), _unit_bytes(columns))
        else:
            peak = _rough_peaks(space.part(rows), microbatches)
            is_open = peak * (1 - ROUNDING) <= usable
            is_rough[rows] = ~is_open
            peak[is_open] = staged_peaks(space.part(rows[is_open]), microbatches)
        bounds.peak_high_bytes[rows] = peak
        rows = rows[peak * (1 - ROUNDING) <= usable]
        if not len(rows):
            continue
        columns = Columns(space.part(rows), microbatches)
        if not is_whole:
            staged = staged_time(columns, usable)
            bounds.step_s[rows] = staged.step_s + overhead_s
            bounds.fitting_s[rows] = staged.fitting_s + overhead_s
            bounds.settling_s[rows] = staged.settling_s
            bounds.besides_s[rows] = staged.besides_s + overhead_s
            continue
        time = whole_time(columns)
        bounds.step_s[rows] = sum(getattr(time, name) for name in _PARTS) + overhead_s
        if space.offload is not Offload.NONE:
            bounds.step_s[rows] += moved_s(columns)
        bounds.fitting_s[rows] = bounds.step_s[rows]
    return bounds


def _rough_peaks(space: Space, microbatches: Microbatches) -> Floats:
    """Rough bounds of rows with stages, computed once for rows that are alike in what they need."""
    axes = space.pp, space.tp, space.cp, space.dp_replicate, space.dp_shard, space.kind
    _, degrees = unique(axes)
    _, alike = unique((degrees, space.accumulation > 1, space.forwards > 1))
    some = space.part(some_of_each(alike))
    return average_peak_bytes(Columns(some, microbatches, for_memory=True))[alike]


def staged_peaks(space: Space, microbatches: Microbatches) -> Floats:
    """Bounds of the peak's upper end of rows with stages."""
    if not len(space):
        return np.zeros(0)
    columns = Columns(space, microbatches, for_memory=True)
    return np.maximum(staged_peak_bytes(columns), _unit_bytes(columns))


def _unit_bytes(columns: Columns) -> Floats:
    """Upper end of a peak while the largest unit runs its backward."""
    least = columns.of(lambda g: g.largest_unit_bytes)
    return upper_end(least, columns.costs.facts.cluster.device)
