"""Biases of attention by head: what a rank sends for them and has of tables is what is charged."""

from __future__ import annotations

from collections import Counter

import pytest
import torch.nn.functional as F

from advisor.cost.model import CostModel
from engines.apply import apply_plan
from engines.plan import Plan
from engines.tensor.rules import proposed_styles
from profiles.capture.capture import capture
from profiles.machine.cluster import Collective
from tests.contract.fake_world import fake_rank
from tests.contract.hybrids import charged
from tests.contract.watch import Messages, Sent, facts_of
from tests.engines.cases import cpu_ranks
from tests.engines.tensor.biases import HEADS, MODELS, TOKENS, sample

ROWS = 2
BATCH = (sample(ROWS), sample(ROWS))


def compared(name: str, text: str) -> tuple[tuple[Sent, Sent], tuple[int, float]]:
    """Messages of one step of the first rank and those charged, and so of bytes of parameters, for
    a plan by the rules."""
    profile = capture(MODELS[name](), BATCH, loss_fn=F.mse_loss, name=name)
    plan = Plan.parse(f"{text} microbatch_size={ROWS}")
    plan = plan.model_copy(update={"tensor_styles": proposed_styles(profile, plan.tp)})
    with fake_rank(0, plan.world_size):
        parallel = apply_plan(
            MODELS[name](),
            plan,
            profile=profile,
            cluster=cpu_ranks(plan.world_size),
            loss_fn=F.mse_loss,
            sample=BATCH,
        )
        parallel.train_step(BATCH)
        parallel.train_step(BATCH)
        with Messages() as sent:
            parallel.train_step(BATCH)
        parameters = sum(parameter.nbytes for parameter in parallel.parameters())
    model = CostModel(facts_of(plan, profile))
    units = model.loads(plan).units
    expected = sum(unit.parameter_bytes for unit in units)
    return (sent.sent, charged(model, plan, 0)), (parameters, expected)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_messages_and_parameters_of_attention_with_a_bias_by_head_are_charged(
    name: str, tp: int, recompute: str
) -> None:
    (called, predicted), (parameters, charged_bytes) = compared(
        name, f"tp={tp} recompute={recompute}"
    )
    assert (called - predicted, predicted - called) == (Counter(), Counter())
    assert parameters == charged_bytes


def test_a_bias_for_later_blocks_is_gathered_once_and_its_gradient_by_each_of_them() -> None:
    """Of three blocks the first makes it: (1, heads, tokens, tokens) in fp32."""
    (called, _), _ = compared("a table for all blocks", "tp=2")
    nbytes = HEADS * TOKENS * TOKENS * 4
    gathers = Counter({key: n for key, n in called.items() if key[0] is Collective.ALL_GATHER})
    assert gathers == Counter({(Collective.ALL_GATHER, nbytes, 2, 1): 1 + 2})
