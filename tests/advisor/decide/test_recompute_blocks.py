"""As few blocks are recomputed as memory asks for."""

from __future__ import annotations

import pytest

from advisor.cost import CostModel
from advisor.decide.choose import choose
from advisor.decide.decision import Decision
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Objective, Policy
from advisor.search.ranking import judged
from engines.plan import PartialPlan, Plan, Recompute
from profiles.closed_forms.transformer import TransformerShape, transformer_profile
from tests.factories import facts, gpus

LAYERS = 16
SHAPE = TransformerShape(
    kind="llama", layers=LAYERS, hidden=2048, heads=16, kv_heads=16, ffn=5504, vocab=32_000,
    length=2048, gated=True, tied=False, head_width=128,
)  # fmt: skip
MODEL = transformer_profile(SHAPE, name="decoder")
ONE = PartialPlan.parse("microbatch_size=2")


def on(memory_gib: float, devices: int = 8) -> Facts:
    return facts(MODEL, gpus(1, devices, memory_gib=memory_gib), batch=16)


def all_recomputed(decision: Decision) -> Plan:
    return decision.plan.recomputing(decision.plan.recompute)


@pytest.mark.parametrize("memory_gib", [8, 10, 12])
def test_the_plan_taken_recomputes_no_more_blocks_than_it_must(memory_gib: float) -> None:
    whole, policy = on(memory_gib), Policy()
    decision = choose(whole, partial=ONE)
    blocks = decision.plan.recompute_blocks
    costs = CostModel(whole)
    counts = [
        n
        for n in range(1, LAYERS)
        if judged(decision.plan.model_copy(update={"recompute_blocks": n}), costs, policy).fits
    ]
    assert decision.plan.recompute is not Recompute.NONE
    assert blocks == counts[0]
    assert decision.estimate.step_s < costs.estimate(all_recomputed(decision)).step_s
    assert any(f"recompute of {blocks} block" in reason for reason in decision.reasons)


def test_blocks_are_counted_by_stage() -> None:
    fixed = "pp=4 dp_replicate=2 microbatch_size=1 schedule=1f1b microbatches=8"
    decision = choose(on(8), partial=PartialPlan.parse(fixed))
    assert 1 <= (decision.plan.recompute_blocks or 0) < LAYERS / 4 + 1
    assert any("blocks a stage" in reason for reason in decision.reasons)


@pytest.mark.parametrize(
    ("settings", "objective"),
    [
        ("microbatch_size=2 recompute=full", Objective.TREE),
        ("microbatch_size=2", Objective.MEMORY),
    ],
)
def test_all_are_where_somebody_says_so_or_memory_counts(
    settings: str, objective: Objective
) -> None:
    partial, policy = PartialPlan.parse(settings), Policy(objective=objective)
    assert choose(on(12), partial=partial, policy=policy).plan.recompute_blocks is None


def test_a_number_that_is_fixed_is_kept_and_the_rest_is_the_best_with_it() -> None:
    whole, partial = on(12), PartialPlan.parse("recompute=selective recompute_blocks=9")
    decision = choose(whole, partial=partial, policy=Policy(objective=Objective.TIME))
    assert decision.plan.recompute_blocks == 9
    costs, policy = CostModel(whole), Policy()
    variants = (
        decision.plan.model_copy(update={"microbatch_size": size, "accumulation": 2 // size})
        for size in (1, 2)
    )
    fitting = [c for c in (judged(each, costs, policy) for each in variants) if c.fits]
    assert min(c.estimate.step_s for c in fitting) == decision.estimate.step_s
