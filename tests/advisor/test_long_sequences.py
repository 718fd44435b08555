"""Sequences too long for a device are shared out; others are not."""

from __future__ import annotations

import pytest

from advisor.candidates import legal_plans
from advisor.choose import choose
from advisor.cost import CostModel
from advisor.policy import Policy
from advisor.search.bounds import ROUNDING
from advisor.search.legal import is_too_long, space_of, styles_of
from advisor.search.search import Search
from advisor.search.stages import Stages
from engines.plan import Precision
from tests.factories import facts, gpus, transformer

LONG = facts(transformer(name="long", layers=16, tokens=512 * 1024), gpus(1), batch=2)
SHORT = facts(transformer(name="short", layers=16, tokens=4096), gpus(1), batch=16)


def test_a_sample_is_too_long_where_what_its_blocks_keep_alone_is_more_than_the_memory() -> None:
    """16 blocks keep 512 Ki tokens x 4,096 x 2 bytes = 4 GiB each, and the logits in fp32 are
    512 Ki x 32,000 x 4 bytes = 62.5 GiB: more than the device's 79.6 GiB."""
    assert is_too_long(LONG, Precision.BF16)
    assert not is_too_long(SHORT, Precision.BF16)


def test_a_model_whose_sequence_is_too_long_for_one_device_chooses_cp() -> None:
    decision = choose(LONG)
    assert decision.plan.cp > 1
    assert all(plan.cp == 1 for plan in legal_plans(SHORT, {}))


def test_a_pinned_degree_of_cp_is_kept_and_the_rest_is_filled_in() -> None:
    plans = legal_plans(SHORT, {"cp": 4})
    assert {plan.cp for plan in plans} == {4}
    assert {plan.data_degree for plan in plans} == {2}


@pytest.mark.parametrize("inter", [400e9, 5e9])
def test_no_estimate_with_shared_sequences_is_below_its_bound(inter: float) -> None:
    model = transformer(name="long", layers=4, tokens=64 * 1024)
    whole = facts(model, gpus(2, 4, memory_gib=12, inter_bytes_per_s=inter), batch=8)
    assert is_too_long(whole, Precision.BF16)
    costs, policy = CostModel(whole), Policy()
    space = space_of(whole, {}, styles=styles_of(whole))
    search = Search(costs, policy, space, Stages(costs, {}, policy))
    assert set(space.cp) == {1, 2, 4, 8}
    for index in range(len(space)):
        found = search.candidate(index).estimate
        bounds = search.bounds
        assert bounds.step_s[index] <= found.step_s * (1 + ROUNDING), str(space.plan(index))
        assert bounds.peak_high_bytes[index] <= found.peak_high_bytes * (1 + ROUNDING)


MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 2000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
