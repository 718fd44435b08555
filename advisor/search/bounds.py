"""Lower bounds of time and memory for all rows at once.

Every formula leaves something out that an estimate has, and adds nothing to it. Rows that share a
microbatch (size, recompute, tp, numerics) share the sums over the model's units, which are the cost
model's own; what is done to them for each row is arithmetic on columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from advisor.cost import Estimate
from advisor.cost.memory import ALLOCATOR_SLACK
from advisor.policy import Policy
from advisor.search.columns import Columns, Floats, Microbatches
from advisor.search.kept import Kept
from advisor.search.own_states import own_staged_peak_bytes, own_whole_peak_bytes
from advisor.search.space import Integers, Space
from advisor.search.staged import staged_peak_bytes, staged_step_s
from advisor.search.whole import moved_s, whole_peak_bytes, whole_time
from engines.plan import Offload

# Bounds add up the same numbers in another order: their last digits may differ from the estimate's.
ROUNDING = 1e-9

PARTS = ("compute_s", "recompute_s", "optimizer_s", "launch_s", "exposed_s")


@dataclass(frozen=True, slots=True)
class Bounds:
    """What no estimate of a row is below.

    Attributes:
        parts: [part, row] of `PARTS` of the step; of models in stages nothing is said of them.
        step_s: of the whole step, at least the sum of its parts.
        peak_high_bytes: of the upper end of the peak.
    """

    parts: Floats
    step_s: Floats
    peak_high_bytes: Floats

    def may_tie(self, rows: Integers, fastest: Estimate, policy: Policy) -> NDArray[np.bool_]:
        """Rows of which it is not certain that they are slower by more than `rules.margin_s`.

        A part that takes x where the fastest takes y adds x - y to the difference and e |x - y| to
        the margin. As e < 1 the one grows faster than the other, so that a row is nearest to a tie
        where each part is at its bound; and where the step's bound is above their sum, all that is
        missing in one of them: x - y - e |x - y| is concave.
        """
        time = fastest.time
        compute, launch, sent = (
            min(1.0, error)
            for error in (fastest.compute_error, fastest.launch_error, fastest.communication_error)
        )
        known = [getattr(time, name) for name in PARTS]
        values = np.array([*known, time.host_s, time.idle_s + time.straggling_s])[:, None]
        errors = np.array([compute, compute, compute, launch, sent, sent, compute])[:, None]
        least = np.concatenate([self.parts[:, rows], np.zeros((2, len(rows)))])
        missing = np.maximum(0.0, self.step_s[rows] - time.host_overhead_s - least.sum(axis=0))

        def beyond(parts: Floats) -> Floats:
            return np.asarray(parts - values - errors * np.abs(parts - values))

        at_bound = beyond(least)
        nearest = at_bound.sum(axis=0) + (beyond(least + missing) - at_bound).min(axis=0)
        slack = ROUNDING * fastest.step_s
        limit = fastest.step_s * (1 + policy.simplicity_margin) + slack
        return np.asarray((self.step_s[rows] <= limit) | (nearest <= slack))


def bounds_of(space: Space, kept: Kept, policy: Policy) -> Bounds:
    """The bounds of every row of `space`; of rows that do not fit, of memory alone."""
    count = len(space)
    device, overhead_s = kept.costs.facts.cluster.device, kept.costs.facts.workload.host_overhead_s
    usable = policy.usable_bytes(device)
    microbatches = Microbatches(space, kept)
    found = Bounds(np.zeros((len(PARTS), count)), np.zeros(count), np.zeros(count))
    bounds = ((True, whole_peak_bytes), (False, staged_peak_bytes))
    # Ranks that update apart from each other keep the states of torch.
    if kept.costs.stack.states is not None and space.updates_in_step:
        bounds = ((True, own_whole_peak_bytes), (False, own_staged_peak_bytes))
    for is_whole, peak_bytes in bounds:
        rows = np.flatnonzero((space.pp == 1) == is_whole)
        if not len(rows):
            continue
        columns = Columns(space.part(rows), microbatches, for_memory=True)
        least = columns.of(lambda g: g.unit_bytes) * (1 + ALLOCATOR_SLACK)
        peak = np.maximum(peak_bytes(columns), least + device.context_bytes.high)
        found.peak_high_bytes[rows] = peak
        rows = rows[peak * (1 - ROUNDING) <= usable]
        if not len(rows):
            continue
        columns = Columns(space.part(rows), microbatches)
        if not is_whole:
            found.step_s[rows] = staged_step_s(columns) + overhead_s
            continue
        time = whole_time(columns)
        parts = np.stack([getattr(time, name) for name in PARTS])
        found.step_s[rows] = parts.sum(axis=0) + overhead_s
        if space.offload is not Offload.NONE:
            found.step_s[rows] += moved_s(columns)
            parts[-1] = 0.0  # what is exposed of transfers to the host is a part of its own
        found.parts[:, rows] = parts
    return found
