"""Lower bounds of time and memory for all rows at once.

Every formula leaves something out that an estimate has, and adds nothing to it. Rows that share a
microbatch (size, recompute, tp, numerics) share the sums over the model's units, which are the cost
model's own; what is done to them for each row is arithmetic on columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from advisor.cost import CostModel, Estimate
from advisor.policy import Policy
from advisor.search.columns import Columns, Floats, Microbatches
from advisor.search.space import Integers, Space
from advisor.search.staged import staged_peak_bytes, staged_step_s
from advisor.search.whole import whole_peak_bytes, whole_time
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


def bounds_of(space: Space, costs: CostModel, policy: Policy) -> Bounds:
    """The bounds of every row of `space`; of rows that do not fit, of memory alone."""
    count = len(space)
    usable = policy.usable_bytes(costs.facts.cluster.device)
    microbatches = Microbatches(space, costs, usable)
    found = Bounds(np.zeros((len(PARTS), count)), np.zeros(count), np.zeros(count))
    overhead_s = costs.facts.workload.host_overhead_s
    whole, staged = np.flatnonzero(space.pp == 1), np.flatnonzero(space.pp > 1)
    if len(whole):
        columns = Columns(space.part(whole), microbatches)
        time = whole_time(columns)
        parts = np.stack([getattr(time, name) for name in PARTS])
        parts[:, ~columns.is_exact] = 0.0
        found.step_s[whole] = parts.sum(axis=0) + overhead_s
        if space.offload is not Offload.NONE:
            parts[-1] = 0.0  # what is exposed of transfers to the host is a part of its own
        found.parts[:, whole] = parts
        found.peak_high_bytes[whole] = whole_peak_bytes(columns)
    if len(staged):
        columns = Columns(space.part(staged), microbatches)
        found.step_s[staged] = staged_step_s(columns) + overhead_s
        found.peak_high_bytes[staged] = staged_peak_bytes(columns)
    return found
