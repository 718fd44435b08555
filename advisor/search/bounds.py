"""Lower bounds of time and memory for all rows at once.

Every formula leaves out terms of the estimate and adds none. Rows that share a microbatch (size,
recompute, tp, numerics) share the cost model's sums over the model's units; the rest is arithmetic
on columns.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from advisor.cost.memory.allocator import upper_end
from advisor.inputs.policy import Policy
from advisor.search.cache import SearchCache
from advisor.search.columns import ROUNDING, Columns, Microbatches
from advisor.search.space import Floats, Space
from advisor.search.staged import staged_peak_bytes, staged_time
from advisor.search.whole import moved_s, whole_time
from advisor.search.whole_peak import whole_peak_bytes
from engines.plan import Offload

_PARTS = ("compute_s", "recompute_s", "optimizer_s", "launch_s", "exposed_s")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds of each row's estimate.

    Attributes:
        step_s, fitting_s: of the step; if the row fits.
        peak_high_bytes: of the upper end of the peak.
        settling_s, besides_s: as `StagedTime`'s, with the host's overhead; zeros without stages.
    """

    step_s: Floats
    fitting_s: Floats
    peak_high_bytes: Floats
    settling_s: Floats
    besides_s: Floats


def bounds_of(space: Space, cache: SearchCache, policy: Policy) -> Bounds:
    """Bounds of every row of `space`; of memory alone for rows that do not fit."""
    count = len(space)
    facts = cache.costs.facts
    device, overhead_s = facts.cluster.device, facts.workload.host_overhead_s
    usable = policy.usable_bytes(device)
    microbatches = Microbatches(space, cache)
    bounds = Bounds(*(np.zeros(count) for _ in fields(Bounds)))
    for is_whole in (True, False):
        rows = np.flatnonzero((space.pp == 1) == is_whole)
        if not len(rows):
            continue
        columns = Columns(space.part(rows), microbatches, for_memory=True)
        least = columns.of(lambda g: g.largest_unit_bytes)
        peak = whole_peak_bytes(columns, usable) if is_whole else staged_peak_bytes(columns)
        peak = np.maximum(peak, upper_end(least, device))
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
