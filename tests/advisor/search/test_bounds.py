"""Rough bounds: raised only where they are asked for, with the answers of bounds raised at once."""

from __future__ import annotations

import numpy as np
import pytest

from advisor.cost import CostModel
from advisor.decide.candidates import searched
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Policy
from advisor.search.cache import SearchCache
from advisor.search.columns import ROUNDING, some_of_each, unique
from advisor.search.search import Search
from engines.plan import PartialPlan
from profiles.closed_forms.families import profile_from_config
from profiles.model.profile import Numerics
from tests.factories import facts, gpus

MIXTURE = profile_from_config(
    {
        "model_type": "mixtral",
        "hidden_size": 512,
        "intermediate_size": 4096,
        "num_hidden_layers": 9,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "vocab_size": 1000,
    },
    samples=1,
    sequence_length=512,
    name="mixture",
    numerics=(Numerics.AS_BUILT, Numerics.BF16, Numerics.BF16_AUTOCAST),
)
MEMORIES_GIB = (3.0, 4.0, 6.0, 12.0)


def mixture(memory_gib: float) -> Facts:
    return facts(MIXTURE, gpus(2, 8, memory_gib=memory_gib), batch=64)


def search_of(whole: Facts, *, ep: int = 1) -> Search:
    partial = PartialPlan() if ep == 1 else PartialPlan.build({"ep": ep})
    return searched(SearchCache(CostModel(whole)), partial, Policy())


@pytest.mark.parametrize("ep", [1, 4])
def test_a_rough_bound_exceeds_memory_and_is_no_higher_than_when_it_is_raised(ep: int) -> None:
    search = search_of(mixture(3.0), ep=ep)
    bounds, rough = search.bounds, search.bounds.is_rough.copy()
    before = bounds.peak_high_bytes.copy()
    assert 0 < rough.sum() < len(rough)
    assert (before[rough] * (1 - ROUNDING) > search.usable_bytes).all()
    search.refine(search.rows)
    assert not bounds.is_rough.any()
    assert (before[rough] <= bounds.peak_high_bytes[rough]).all()
    assert (before[rough] < bounds.peak_high_bytes[rough]).any()
    assert (before[~rough] == bounds.peak_high_bytes[~rough]).all()


@pytest.mark.parametrize("memory_gib", MEMORIES_GIB)
def test_the_best_of_every_kind_is_that_of_bounds_raised_at_once(memory_gib: float) -> None:
    whole = mixture(memory_gib)
    lazy, eager = search_of(whole), search_of(whole)
    eager.refine(eager.rows)
    for (_, rows), (_, same_rows) in zip(lazy.kinds, eager.kinds, strict=True):
        for most in (2, None):
            one, other = lazy.strongest(rows, most=most), eager.strongest(same_rows, most=most)
            assert (one and one.plan) == (other and other.plan)
    assert [c.plan for c in lazy.weighed] == [c.plan for c in eager.weighed]
    assert lazy.left_out == eager.left_out
    assert memory_gib > MEMORIES_GIB[1] or lazy.bounds.is_rough.any()


def test_where_nothing_fits_the_nearest_miss_is_that_of_bounds_raised_at_once() -> None:
    whole = mixture(2.2)
    lazy, eager = search_of(whole), search_of(whole)
    eager.refine(eager.rows)
    assert lazy.fastest(lazy.rows) is None
    assert lazy.least_missing_bytes == eager.least_missing_bytes
    one, other = lazy.nearest(lazy.rows), eager.nearest(eager.rows)
    assert one is not None
    assert other is not None
    assert one.plan == other.plan


def test_rows_are_told_apart_in_runs_and_out_of_them() -> None:
    """In codes that a table holds, and in larger ones."""
    generator = np.random.default_rng(0)
    for scale in (1, 100_000):
        keys = [np.repeat(generator.integers(0, 4, 50), 3) * scale for _ in range(3)]
        keys.append(generator.integers(0, 2, 150).astype(bool))
        different, group = unique(keys)
        whole = np.stack(keys)
        assert (different[:, group] == whole).all()
        assert different.shape[1] == len(set(zip(*whole.tolist(), strict=True)))
        assert (group[some_of_each(group)] == np.arange(different.shape[1])).all()
