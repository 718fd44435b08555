"""A chunked loss is taken where whole logits cost a fit or recompute, and only there."""

from __future__ import annotations

from contextlib import suppress

import pytest

from advisor.decide.choose import choose
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Objective, Policy
from advisor.whatif.why_not import why_not
from engines.plan import PartialPlan
from profiles.closed_forms.transformer import TransformerShape, transformer_profile
from profiles.errors import NoPlanError
from profiles.workload.stack import LOSS_CHUNKS
from tests.factories import facts, gpus

SHAPE = TransformerShape(
    kind="llama", layers=4, hidden=1024, heads=8, kv_heads=8, ffn=4096, vocab=128_000,
    length=8192, gated=True, tied=True, head_width=128,
)  # fmt: skip
# Logits of one sample in fp32 are 4 GiB; states and activations of a block are less.
MODEL = transformer_profile(SHAPE, name="large vocabulary")


def on(memory_gib: float, *, batch: int = 2) -> Facts:
    return facts(MODEL, gpus(1, 2, memory_gib=memory_gib), batch=batch)


def test_chunks_are_taken_where_whole_logits_fit_nothing() -> None:
    decision = choose(on(10))
    assert decision.plan.loss_chunks == LOSS_CHUNKS
    assert any("Head and loss are computed for 1/8" in reason for reason in decision.reasons)
    with pytest.raises(NoPlanError):
        choose(on(10), partial=PartialPlan.parse("loss_chunks=1"))


@pytest.mark.parametrize("memory_gib", [14, 18])
def test_chunks_are_taken_where_whole_logits_cost_time(memory_gib: float) -> None:
    whole = on(memory_gib)
    decision = choose(whole)
    assert decision.plan == choose(whole, partial=PartialPlan.parse("loss_chunks=8")).plan
    without = choose(whole, partial=PartialPlan.parse("loss_chunks=1"))
    assert decision.estimate.step_s < without.estimate.step_s / 1.05


@pytest.mark.parametrize(("memory_gib", "batch"), [(11, 2), (13, 16), (16, 4), (24, 16)])
def test_the_rows_that_are_searched_again_have_the_plan_of_a_search_of_all(
    memory_gib: float, batch: int
) -> None:
    whole = on(memory_gib, batch=batch)
    chunked = choose(whole, partial=PartialPlan.parse("loss_chunks=8"))
    expected = chunked
    with suppress(NoPlanError):
        without = choose(whole, partial=PartialPlan.parse("loss_chunks=1"))
        if without.estimate.step_s <= 1.05 * chunked.estimate.step_s:
            expected = without
    assert choose(whole).plan == expected.plan


def test_whole_logits_stay_where_there_is_room() -> None:
    decision = choose(on(32))
    assert decision.plan.loss_chunks == 1
    smallest = choose(on(32), policy=Policy(objective=Objective.MEMORY))
    assert smallest.plan.loss_chunks == LOSS_CHUNKS


def test_why_not_estimates_a_named_number_of_chunks() -> None:
    answer = why_not(choose(on(79.6)), "dp_replicate=2 loss_chunks=16")
    assert answer.plan is not None
    assert answer.plan.loss_chunks == 16


def test_why_not_says_who_reads_whole_logits() -> None:
    read = facts(MODEL.model_copy(update={"logits_read_by": "logsumexp"}), gpus(1, 2), batch=2)
    answer = why_not(choose(read), "loss_chunks=8")
    assert "which `logsumexp` reads" in str(answer)
