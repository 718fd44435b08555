"""`why_not`: pipelines, split layers, hybrids, and impossible plans."""

from __future__ import annotations

import pytest

from advisor.cost import estimate
from advisor.decide.candidates import legal_plans
from advisor.decide.choose import choose
from advisor.decide.comparison import PlanVerdict, causes, signed_percent
from advisor.decide.decision import Decision
from advisor.inputs.policy import Policy
from engines.plan import PartialPlan
from profiles.closed_forms.families import profile_from_config
from profiles.model.profile import Numerics
from profiles.units import format_gib
from tests.factories import facts, gpus

LLAMA = {
    "model_type": "llama",
    "vocab_size": 4000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
SMALL = profile_from_config(
    LLAMA, samples=1, sequence_length=1024, name="small", numerics=tuple(Numerics)
)
WHOLE = facts(SMALL, gpus(1, 4), batch=4)


@pytest.fixture(scope="module")
def decision() -> Decision:
    return choose(WHOLE)


@pytest.mark.parametrize(
    "asked",
    [
        "pp=2",
        "pp=4",
        "tp=2",
        "tp=4",
        "pp=2 tp=2",
        "pp=2 zero=3",
        "pp=2 zero=1 schedule=1f1b",
        "tp=2 dp_shard=2",
        "pp=2 schedule=interleaved recompute=full",
    ],
)
def test_the_best_plan_with_the_settings_is_compared_with_the_choice(
    decision: Decision, asked: str
) -> None:
    answer = decision.why_not(asked)
    partial = PartialPlan.parse(asked)
    every = [(estimate(plan, WHOLE), str(plan)) for plan in legal_plans(WHOLE, partial)]
    usable = Policy().usable_bytes(WHOLE.cluster.device)
    fastest = min(e.step_s for e, _ in every if e.fits(usable))
    assert answer.plan is not None
    assert answer.estimate == estimate(answer.plan, WHOLE)
    assert str(answer.plan) in {name for _, name in every}
    # The simplest of those that tie with the fastest.
    assert fastest <= answer.estimate.step_s <= 1.3 * fastest
    difference = answer.estimate.step_s / decision.estimate.step_s - 1
    assert signed_percent(difference) in answer.because
    assert answer.verdict in (
        PlanVerdict.SLOWER,
        PlanVerdict.TIE,
        PlanVerdict.OUTSIDE,
        PlanVerdict.CHOSEN,
    )


def test_a_naive_pipeline_is_slower_because_its_stages_idle(decision: Decision) -> None:
    """Of four naive stages only one computes at a time."""
    answer = decision.why_not("pp=4 schedule=naive")
    assert answer.verdict is PlanVerdict.SLOWER
    assert "more waiting for other stages" in answer.because
    assert answer.estimate is not None
    assert answer.estimate.time.idle_s > 0.5 * answer.estimate.step_s


def test_a_plan_that_does_not_fit_states_the_missing_memory() -> None:
    tight = facts(SMALL, gpus(1, 4, memory_gib=4.0), batch=16)
    answer = choose(tight).why_not("zero=0 pp=1 tp=1 recompute=none")
    assert answer.verdict is PlanVerdict.NO_FIT
    assert answer.estimate is not None
    usable = Policy().usable_bytes(tight.cluster.device)
    missing = answer.estimate.peak_high_bytes - usable
    assert f"{format_gib(missing)} too much" in answer.because


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("pp=3", "plan needs 3 ranks (pp=3), 1x4xH100-like has 4"),
        ("tp=8", "plan needs 8 ranks (tp=8), 1x4xH100-like has 4"),
        ("pp=3", "`pp` may be 1, 2 or 4 here"),
        ("cp=2 compile=true", "torch.compile does not see the ring in place of attention (cp=2)"),
        ("pp=4 microbatches=2 schedule=1f1b", "microbatches=2, pp=4"),
        ("pp=2 schedule=interleaved microbatches=1", "microbatches=1 is no multiple of pp=2"),
        ("dp_shard=4 zero=1", "ZeRO-1 and ZeRO-2 shard over dp_replicate"),
    ],
)
def test_illegal_settings_are_explained_with_numbers(
    decision: Decision, asked: str, words: str
) -> None:
    answer = decision.why_not(asked)
    assert answer.verdict is PlanVerdict.NOT_LEGAL
    assert words in answer.because
    assert (answer.plan, answer.estimate) == (None, None)


def test_more_stages_than_units_are_not_legal() -> None:
    few = profile_from_config(
        {**LLAMA, "num_hidden_layers": 1},
        samples=1,
        sequence_length=1024,
        name="few",
        numerics=tuple(Numerics),
    )
    answer = choose(facts(few, gpus(1, 8), batch=16)).why_not("pp=8")
    assert answer.verdict is PlanVerdict.NOT_LEGAL
    assert "pp=8 needs 8 units" in answer.because


def test_parts_that_differ_by_rounding_only_are_not_named(decision: Decision) -> None:
    """Summing in another order makes a difference in the total that no part has."""
    mine = decision.estimate
    theirs = mine.model_copy(update={"step_s": mine.step_s * (1 + 1e-12)})
    assert causes(theirs, mine) == ""
