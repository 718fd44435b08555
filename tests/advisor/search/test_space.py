"""The search space: rows are legal plans, and no plan that engines can run is missing."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from advisor.cost import CostModel
from advisor.decide.candidates import legal_plans, searched
from advisor.inputs.policy import Policy
from advisor.search.cache import SearchCache
from advisor.search.space import divisors, stages_per_rank
from engines.legality import problems
from engines.plan import PartialPlan, Schedule
from tests.advisor.search.test_search import LLAMAS
from tests.factories import facts, gpus

WHOLE = facts(LLAMAS[3, 100], gpus(1, 6), batch=12)


def test_every_row_is_a_legal_plan_and_no_two_are_the_same() -> None:
    plans = legal_plans(WHOLE, PartialPlan.build({"recompute": "none"}))
    assert len(set(map(str, plans))) == len(plans)
    for plan in plans:
        assert problems(plan, WHOLE.model, WHOLE.cluster) == [], str(plan)
        assert plan.world_size == 6
        assert plan.global_batch_size == 12


def test_all_degrees_that_multiply_to_the_devices_are_there() -> None:
    """Four heads and a vocabulary of 100 can be split some way over any of these; there are six
    units to begin stages with."""
    plans = legal_plans(WHOLE, PartialPlan.build({"recompute": "none", "zero": 0}))
    degrees = {(plan.pp, plan.tp, plan.dp_replicate) for plan in plans}
    every = {n for n in product(range(1, 7), repeat=3) if n[0] * n[1] * n[2] == 6}
    assert degrees == every
    assert {plan.schedule for plan in plans} == {None, *Schedule}


@pytest.mark.parametrize("number", [1, 2, 12, 97, 2048])
def test_divisors_leave_no_remainder(number: int) -> None:
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


def test_stages_a_rank_are_the_fewest_of_each_size() -> None:
    """126 pieces on 8 ranks: 16, 8, 6, ... at most in a stage."""
    counts = stages_per_rank(Schedule.INTERLEAVED, 8, 126)
    assert [-(-126 // (8 * n)) for n in counts] == [8, 6, 4, 3, 2]
    assert stages_per_rank(Schedule.ZBV, 4, 7) == []


def test_spaces_have_the_same_rows_if_all_of_them_are_equal_and_in_order() -> None:
    space = searched(SearchCache(CostModel(WHOLE)), PartialPlan(), Policy()).space
    some = space.part(np.arange(5))
    assert some.has_rows_of(space.part(np.arange(5)))
    assert not some.has_rows_of(space.part(np.arange(5)[::-1]))
    assert not some.has_rows_of(space.part(np.arange(4)))
