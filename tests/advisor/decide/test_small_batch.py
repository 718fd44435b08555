"""Hints at small batches: where devices wait, and where batch norms see too little."""

from __future__ import annotations

import pytest

from advisor.decide.choose import choose
from advisor.decide.decision import Decision
from advisor.decide.small_batch import LARGER, WASTEFUL, small_batch_hints
from engines.plan import PartialPlan
from tests.factories import facts, gpus, small_llama


def decided(batch: int, *, norms: tuple[str, ...] = (), **fixed: object) -> Decision:
    known = facts(small_llama(), gpus(1, 8), batch=batch)
    model = known.model.model_copy(update={"batch_norms": norms})
    return choose(
        known.model_copy(update={"model": model}),
        partial=PartialPlan.build({"dp_replicate": 8, **fixed}),
    )


def hints(decision: Decision) -> str:
    return "\n".join(small_batch_hints(decision))


def test_a_large_batch_has_no_such_hint() -> None:
    assert hints(decided(1024)) == ""


def test_the_gain_that_is_named_is_that_of_two_estimates() -> None:
    small, larger = decided(8, microbatch_size=1), decided(8 * LARGER, microbatch_size=LARGER)
    times = LARGER * small.estimate.step_s / larger.estimate.step_s
    said = f"global batch {8 * LARGER} would train {times:.1f} times as many samples a second"
    assert (said in hints(small)) == (times >= WASTEFUL)


@pytest.mark.parametrize(
    ("batch", "sync", "said"),
    [
        (16, False, "`norm1` takes statistics over 2 samples: "),
        (16, True, ""),  # of all replicas: 16
        (8, True, "`norm1` takes statistics over 8 samples: "),
        (1024, False, ""),
    ],
)
def test_statistics_of_few_samples_are_named(batch: int, sync: bool, said: str) -> None:
    decision = decided(batch, norms=("norm1",), sync_batch_norm=sync, microbatch_size=batch // 8)
    text = hints(decision)
    assert (said in text) if said else ("takes statistics" not in text)
    if said and not sync:
        assert "`sync_batch_norm=true` takes the 16 of all replicas" in text
