"""The cases take every branch of the tree, and the plans that are run hold those that must be."""

from __future__ import annotations

from advisor.decide.tree import LEAVES
from engines.plan import Plan
from tests.regret.cases import CASES, MACHINES, QUICK, Budget
from tests.regret.models import MODELS
from tests.regret.picked import sampled

PLANS = [Plan.parse(f"dp_replicate=2 microbatch_size={size}") for size in range(1, 101)]


def test_every_leaf_of_the_tree_is_meant_by_a_case() -> None:
    assert {case.leaf for case in CASES.values()} == {leaf.name for leaf in LEAVES}


def test_every_model_all_machines_and_all_budgets_are_in_a_case() -> None:
    cases = CASES.values()
    assert {case.model for case in cases} == set(MODELS)
    assert {case.machines for case in cases} == set(MACHINES)
    assert {case.budget for case in cases} == set(Budget)
    assert len({CASES[name].leaf for name in QUICK}) == len(QUICK) == 4


def test_each_batch_divides_over_the_ranks() -> None:
    assert all(case.rows % case.ranks == 0 for case in CASES.values())


def test_a_sample_holds_what_must_be_in_it_first_and_is_the_same_every_time() -> None:
    always = [PLANS[70], PLANS[3], PLANS[70]]
    plans, again = (sampled(always, 100, PLANS.__getitem__, most=20, seed=4) for _ in range(2))
    assert plans == again
    assert plans[:2] == [PLANS[70], PLANS[3]]
    assert len(set(plans)) == len(plans) == 20


def test_few_legal_plans_are_all_taken() -> None:
    plans = sampled(PLANS[:2], 10, PLANS.__getitem__, most=40, seed=0)
    assert set(plans) == set(PLANS[:10])


def test_what_must_be_run_is_not_cut() -> None:
    assert sampled(PLANS[:30], 100, PLANS.__getitem__, most=20, seed=0) == PLANS[:30]
