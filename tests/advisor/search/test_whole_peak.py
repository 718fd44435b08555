"""Peaks of plans without stages: bounds of many rows at once against single estimates."""

from __future__ import annotations

import numpy as np
import pytest

from advisor.inputs.facts import Facts
from advisor.inputs.policy import Policy
from engines.plan import Offload, OffloadTo
from profiles.model.profile import ModelProfile
from profiles.workload.stack import stack_named
from tests.advisor.search.test_search import MIDDLE, llama, searched
from tests.factories import cpus, facts, gpus

EXACT = 1e-6
"""Sums in another order, as a fraction of a peak."""
SHARES_DIFFER = 5e-3
"""With larger microbatches a bound may lie below the peak by this fraction."""
ROWS = 150

MIDDLE_ON_GPUS = facts(MIDDLE, gpus(2, 4), batch=32)
LLAMA_ON_CPUS = facts(llama(4), cpus(4), batch=16)


def partly_whole(model: ModelProfile) -> ModelProfile:
    """As if the largest parameter of every block could not be sharded."""
    units = []
    for unit in model.units:
        if unit.is_block:
            largest = max(unit.shapes, key=lambda shape: shape.nbytes)
            largest = largest.model_copy(update={"count": 1})
            update = {"whole_bytes": largest.nbytes, "whole_shapes": (largest,)}
            unit = unit.model_copy(update=update)
        units.append(unit)
    return model.model_copy(update={"units": tuple(units)})


@pytest.mark.parametrize(
    ("whole", "offload", "to"),
    [
        (MIDDLE_ON_GPUS, Offload.NONE, OffloadTo.HOST),
        (MIDDLE_ON_GPUS, Offload.OPTIMIZER, OffloadTo.HOST),
        (MIDDLE_ON_GPUS, Offload.STATES, OffloadTo.HOST),
        (MIDDLE_ON_GPUS, Offload.ACTIVATIONS, OffloadTo.HOST),
        (LLAMA_ON_CPUS, Offload.NONE, OffloadTo.HOST),
        (facts(partly_whole(llama(4)), gpus(2, 4), batch=32), Offload.NONE, OffloadTo.HOST),
        (facts(partly_whole(llama(4)), gpus(2, 4), batch=32), Offload.STATES, OffloadTo.HOST),
        (LLAMA_ON_CPUS, Offload.STATES, OffloadTo.HOST),
        (LLAMA_ON_CPUS, Offload.OPTIMIZER, OffloadTo.DISK),
    ],
)
def test_bounds_of_plans_without_stages_equal_their_peaks(
    whole: Facts, offload: Offload, to: OffloadTo
) -> None:
    assert_exact(whole, offload, to)


@pytest.mark.parametrize("name", ["torchtitan", "deepspeed", "megatron-2020", "nemo"])
def test_bounds_under_other_stacks_equal_their_peaks(name: str) -> None:
    assert_exact(facts(MIDDLE, gpus(2, 4), batch=32, stack=stack_named(name)))


def assert_exact(
    whole: Facts, offload: Offload = Offload.NONE, to: OffloadTo = OffloadTo.HOST
) -> None:
    """Compare microbatches up to two samples exactly, larger ones from below and closely."""
    search = searched(whole, Policy(), offload, to)
    rows = np.flatnonzero(search.space.pp == 1)
    compared = 0
    for row in np.random.default_rng(0).permutation(rows)[:ROWS]:
        candidate = search.candidate(int(row))
        if candidate is None:
            continue
        bound, peak = search.bounds.peak_high_bytes[row], candidate.estimate.peak_high_bytes
        assert bound <= peak * (1 + EXACT), str(candidate.plan)
        error = EXACT if search.space.microbatch_size[row] <= 2 else SHARES_DIFFER
        assert bound >= peak * (1 - error), str(candidate.plan)
        compared += 1
    assert compared >= 5
