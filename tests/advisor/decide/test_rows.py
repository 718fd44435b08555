"""Rows of the table of alternatives: the plans that must be among them."""

from __future__ import annotations

import pytest

from advisor.cost import CostModel
from advisor.decide.candidates import legal_plans
from advisor.decide.choose import choose
from advisor.decide.tree import Family, in_leaf
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Policy
from advisor.search.ranking import weigh
from engines.plan import PartialPlan
from profiles.closed_forms.families import profile_from_config
from tests.factories import ALL_NUMERICS, facts, gpus

LLAMA = profile_from_config(
    {
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 32000,
    },
    samples=1,
    sequence_length=1024,
    name="llama",
    numerics=ALL_NUMERICS,
)
QUESTIONS = {
    "fast network": facts(LLAMA, gpus(2, 4), batch=32),
    "slow network": facts(LLAMA, gpus(2, 4, memory_gib=6.2, inter_bytes_per_s=5e8), batch=32),
    "few rows": facts(LLAMA, gpus(2, 2), batch=4),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_best_plan_with_stages_and_split_layers_is_a_row_where_the_tree_names_it(
    name: str,
) -> None:
    whole: Facts = QUESTIONS[name]
    decision = choose(whole)
    assert {Family.PP_TP_DP, Family.DP_PP_TP_ZERO1} & set(decision.trace.families)
    shown = [decision.plan, *(other.plan for other in decision.alternatives)]
    rows = [plan for plan in shown if plan.pp > 1 and plan.tp > 1]
    assert rows
    legal = legal_plans(whole, PartialPlan())
    both = [plan for plan in legal if plan.pp > 1 and plan.tp > 1]
    every = [each for each in weigh(both, CostModel(whole), Policy()) if each.fits]
    of_leaf = [c for c in every if in_leaf(c.plan, decision.trace)]
    # Of many plans those in 1F1B, as published runs take.
    plain = [c for c in of_leaf if len(every) < 64 or c.plan.schedule == "1f1b"]
    best_s = min(c.estimate.step_s for c in plain)
    costs = CostModel(whole)
    assert min(costs.estimate(plan).step_s for plan in rows) <= best_s * (1 + 1e-9)


def test_rows_of_the_tree_do_not_lengthen_the_table() -> None:
    decision = choose(QUESTIONS["fast network"])
    assert len(decision.alternatives) <= Policy().alternatives
    steps = [other.step_s for other in decision.alternatives if other.step_s is not None]
    assert steps == sorted(steps)
