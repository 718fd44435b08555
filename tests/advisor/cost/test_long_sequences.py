"""Context parallelism where a sequence does not fit a device, expert parallelism where faster."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from advisor.auto.parallelize import advise
from advisor.cost import CostModel
from advisor.decide.candidates import legal_plans
from advisor.decide.choose import choose
from advisor.decide.tree import in_leaf
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Policy
from advisor.search.cache import SearchCache
from advisor.search.columns import ROUNDING
from advisor.search.legal import is_too_long, space_of, styles_of
from advisor.search.search import Search
from advisor.search.space import Space
from advisor.search.stages import StageSearch
from engines.context.proof import prove
from engines.plan import PartialPlan, Plan
from profiles.closed_forms.families import profile_from_config
from profiles.errors import NoPlanError, PlanError
from profiles.model.profile import ModelProfile, Numerics
from tests.factories import facts, gpus, transformer

LONG = facts(transformer(name="long", layers=16, tokens=512 * 1024), gpus(1), batch=2)
SHORT = facts(transformer(name="short", layers=16, tokens=4096), gpus(1), batch=16)


def test_a_sample_is_too_long_where_it_does_not_fit_a_device_with_all_else_sharded() -> None:
    """16 blocks keep 512 Ki tokens x 4,096 x 2 bytes = 4 GiB each, and the logits in fp32 are
    512 Ki x 32,000 x 4 bytes = 62.5 GiB: more than the device's 79.6 GiB."""
    assert is_too_long(LONG, PartialPlan(), styles_of(LONG))
    assert not is_too_long(SHORT, PartialPlan(), styles_of(SHORT))


def test_a_model_whose_sequence_is_too_long_for_one_device_chooses_cp() -> None:
    decision = choose(LONG)
    assert decision.plan.cp > 1
    (why,) = [reason for reason in decision.reasons if "tokens" in reason]
    assert "A sample of 524,288 tokens needs up to" in why
    assert re.search(r"exchange of keys and values: \S+ GiB a step and device over NVLink", why)
    assert in_leaf(decision.plan, decision.trace)
    assert all(plan.cp == 1 for plan in legal_plans(SHORT, PartialPlan()))


def test_a_pinned_degree_of_cp_is_kept_and_the_rest_is_filled_in() -> None:
    plans = legal_plans(SHORT, PartialPlan.build({"cp": 4}))
    assert {plan.cp for plan in plans} == {4}
    assert {plan.data_degree for plan in plans} == {2}


def mixture() -> ModelProfile:
    """Eight experts in each of twelve blocks, two for a token."""
    config = {
        "model_type": "mixtral",
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 8000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    kinds = (Numerics.AS_BUILT, Numerics.BF16, Numerics.BF16_AUTOCAST)
    model = profile_from_config(
        config, samples=1, sequence_length=1024, name="mixture", numerics=kinds
    )
    assert {unit.experts for unit in model.blocks()} == {(8,)}
    return model


def test_expert_parallelism_is_chosen_where_gathering_experts_is_slower_than_sending_tokens() -> (
    None
):
    """On slow links ZeRO-3 gathers eight experts a block for few tokens; a pin keeps them whole."""
    slow = facts(mixture(), gpus(1, memory_gib=24, intra_bytes_per_s=5e9), batch=8)
    partial = PartialPlan.build({"pp": 1, "tp": 1})
    decision = choose(slow, partial=partial)
    assert decision.plan.ep > 1
    assert any("share the experts; exchange of tokens: " in reason for reason in decision.reasons)
    whole = choose(slow, partial=partial.fixing(ep=1))
    assert whole.plan.ep == 1
    assert whole.estimate.step_s > decision.estimate.step_s
    for plan in legal_plans(slow, partial.fixing(ep=8)):
        assert (plan.ep, plan.data_degree) == (8, 8)


def require_bounds(whole: Facts, partial: PartialPlan) -> Space:
    """Assert that no row of the space is estimated below its bounds."""
    cache, policy = SearchCache(CostModel(whole)), Policy()
    space = space_of(whole, partial, styles=styles_of(whole))
    search = Search(cache, policy, space, StageSearch(cache, partial, policy))
    for index in range(len(space)):
        cost, bounds = search.candidate(index).estimate, search.bounds
        assert bounds.step_s[index] <= cost.step_s * (1 + ROUNDING), str(space.plan(index))
        assert bounds.peak_high_bytes[index] <= cost.peak_high_bytes * (1 + ROUNDING)
    return space


@pytest.mark.parametrize("inter", [400e9, 5e9])
def test_no_estimate_with_context_parallelism_is_below_its_bound(inter: float) -> None:
    model = transformer(name="long", layers=4, tokens=64 * 1024)
    whole = facts(model, gpus(2, 4, memory_gib=12, inter_bytes_per_s=inter), batch=8)
    assert is_too_long(whole, PartialPlan(), styles_of(whole))
    assert set(require_bounds(whole, PartialPlan.build({})).cp) == {1, 2, 4, 8}


@pytest.mark.parametrize("ep", [2, 8])
def test_no_estimate_with_expert_parallelism_is_below_its_bound(ep: int) -> None:
    whole = facts(mixture(), gpus(2, 4, memory_gib=24), batch=16)
    assert len(require_bounds(whole, PartialPlan.build({"ep": ep, "cp": 1}))) > 0


def test_an_ep_degree_that_does_not_divide_the_ranks_is_refused_with_those_that_do() -> None:
    whole = facts(mixture(), gpus(1), batch=8)
    with pytest.raises(PlanError) as error:
        choose(whole, partial=PartialPlan(ep=3, pp=1, tp=1))
    assert "ep=3 lies inside the data axes, which have 8 ranks" in error.value.what
    assert "`ep` may be 1, 2, 4 or 8 here" in error.value.hints


class ByHand(nn.Module):
    """A mean over tokens that no ring can replace, and a head that makes the loss large."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x + x.mean(1, keepdim=True))
        return x @ self.embed.weight.t()


class Alone(ByHand):
    """The same model without the mean: no token depends on another."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight.t()


@pytest.mark.nightly
def test_no_decision_shards_a_sequence_that_the_engine_would_refuse() -> None:
    """4 Mi tokens x 100 classes x 4 bytes are 1.6 GiB of logits, with about four copies of them at
    once and a context of 2 GiB: too much for 7 GiB, while half of it fits."""
    ids = torch.zeros(2, 4 * 2**20, dtype=torch.int64)

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def decided(model: nn.Module) -> Plan:
        return advise(
            model,
            sample=(ids, ids),
            loss_fn=loss_fn,
            plan="pp=1 tp=1 offload=none",
            cluster=gpus(1, 2, memory_gib=7),
            global_batch_size=2,
        ).plan

    assert decided(Alone()).cp == 2
    with pytest.raises(NoPlanError):
        decided(ByHand())
    with pytest.raises(PlanError, match="attention calls seen: 0"):
        prove(ByHand(), (ids, ids), loss_fn, size=2)
