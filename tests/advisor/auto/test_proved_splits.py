"""Splits that are proved on a module, and whose."""

from __future__ import annotations

import pytest

from advisor.auto.proved_splits import Pairs, choose_checked
from advisor.decide.choose import choose
from advisor.inputs.bundled.gpt_shapes import GPTConfig
from advisor.inputs.facts import Facts
from advisor.inputs.gpts import gpt_profile
from advisor.inputs.policy import Policy
from engines.plan import PartialPlan
from profiles.machine.clusters import resolve_cluster
from profiles.model.profile import Numerics
from profiles.workload.stack import stack_named
from profiles.workload.workload import Workload

SHAPE = GPTConfig(vocab_size=512, context=64, num_layers=4, num_heads=4, width=256)
SPLIT = PartialPlan.parse("tp=2")


def facts(stack: str) -> Facts:
    model = gpt_profile(
        SHAPE, name="gpt", samples=1, sequence_length=None, numerics=tuple(Numerics)
    )
    return Facts(
        model=model,
        cluster=resolve_cluster("2xH100-SXM-80GB"),
        workload=Workload(global_batch_size=8, precision="bf16"),
        stack=stack_named(stack),
    )


def test_a_split_that_the_module_does_not_allow_gives_way_to_one_that_it_does() -> None:
    whole: Pairs = (("blocks.*.mlp.0", "gather"),)
    decision = choose_checked(
        facts("torch"), policy=Policy(), partial=SPLIT, check=lambda tp, by_tokens: whole
    )
    assert decision.plan.tensor_styles == whole


@pytest.mark.parametrize("stack", ["megatron-core-0.12", "nemo"])
def test_other_software_splits_its_own_modules_in_its_own_way(stack: str) -> None:
    def check(tp: int, by_tokens: bool) -> Pairs:
        raise AssertionError("our engines do not split for it")

    decision = choose_checked(facts(stack), policy=Policy(), partial=SPLIT, check=check)
    assert decision.plan == choose(facts(stack), policy=Policy(), partial=SPLIT).plan
