"""An optimizer measured on a model's parameters has the states of a rank's part of them."""

from __future__ import annotations

import pytest
import torch

from advisor.auto.facts_from_module import facts_from_module
from advisor.cost import estimate
from advisor.inputs.facts import Facts
from engines.plan import Plan
from engines.tensor.rules import proposed_styles
from tests.engines.cases import cpu_ranks
from tests.matrix.architectures import ARCHITECTURES


def _facts(name: str) -> Facts:
    subject = ARCHITECTURES[name]
    return facts_from_module(
        subject.build(),
        subject.batch,
        loss_fn=subject.loss_fn,
        cluster=cpu_ranks(4),
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
        global_batch_size=8,
    )


@pytest.mark.parametrize(
    ("name", "settings"),
    [("Llama", "tp=4"), ("Llama", "tp=2 dp_shard=2"), ("Mixtral", "dp_replicate=4 ep=2")],
)
def test_adamw_has_two_values_for_each_parameter_of_a_rank(name: str, settings: str) -> None:
    facts = _facts(name)
    plan = Plan.parse(f"{settings} microbatch_size=2")
    styles = proposed_styles(facts.model, plan.tp) if plan.tp > 1 else ()
    cost = estimate(plan.model_copy(update={"tensor_styles": styles}), facts)
    memory, whole = cost.memory, facts.model.parameters * 4
    assert memory.parameters < 0.9 * whole  # it is a part
    assert memory.optimizer == pytest.approx(2 * memory.parameters, rel=1e-6)
