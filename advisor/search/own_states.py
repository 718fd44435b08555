"""Lower bound of memory for stacks that keep model states of their own."""

from __future__ import annotations

import numpy as np

from advisor.cost.memory import ALLOCATOR_SLACK
from advisor.cost.states import zero_level
from advisor.search.columns import Columns, Floats
from advisor.search.space import KINDS
from engines.plan import Plan
from profiles.optimizer_laws import FP32_BYTES

_LEVELS = np.array([zero_level(Plan.model_construct(data_parallel=kind)) for kind in KINDS])


def own_states_peak_bytes(columns: Columns) -> Floats:
    """The upper end of the states alone, shared evenly among stages: the fullest has no less."""
    space, facts = columns.space, columns.costs.facts
    states = columns.costs.stack.states
    assert states is not None
    whole = columns.of(lambda g: g.loads.parameter_bytes) / FP32_BYTES / space.pp
    level, shards = _LEVELS[space.kind], columns.shards

    def spread(nbytes: float, from_level: int) -> Floats:
        return np.asarray(nbytes * whole / np.where(level >= from_level, shards, 1))

    moments = columns.states_bytes() / space.pp
    if states.moments is not None:
        moments = spread(states.moments, 1)
    held = spread(states.weight, 3) + spread(states.gradient, 2) + spread(states.master, 1)
    batch = facts.model.batch_bytes
    held = held + moments + batch.fixed + batch.per_sample * space.microbatch_size
    context = facts.cluster.device.context_bytes.high
    return np.asarray(held * (1 + ALLOCATOR_SLACK) + context)
