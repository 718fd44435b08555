"""Every engine, and what combines them, in worlds of up to 1,024 ranks: what is charged is true."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from engines.tensor.rules import proposed_styles
from tests.contract.hybrids import PLANS, Compared, compared, subject_of
from tests.nightly import nightly

# What others of the plans do together with more, or on microbatches.
SELDOM = (
    "ZeRO-1", "ZeRO-2", "HSDP", "TP by tokens", "TP, recompute", "TP + DP", "TP + ZeRO-3",
    "PP + DP", "PP + ZeRO-1", "PP + ZeRO-2", "PP + ZeRO-3", "PP (GPipe) + ZeRO-3", "PP + HSDP",
    "PP + TP", "PP + TP + ZeRO-1", "PP + TP + ZeRO-3", "PP + TP + HSDP", "EP + DP",
    "EP + ZeRO-1, recompute", "PP + EP + DP", "PP + EP + ZeRO-3", "TP by tokens + EP + ZeRO-1",
)  # fmt: skip
# Scratch of a few bytes a token: which row of a table is here, the logit of a row's class.
ACTIVATIONS_WITHIN = 0.02


@pytest.fixture(
    scope="module", params=[*(name for name in PLANS if name not in SELDOM), *nightly(*SELDOM)]
)
def compared_ranks(request: pytest.FixtureRequest) -> list[Compared]:
    """Of the first and the last stage; `python -m tests.contract.table` shows those between."""
    subject = subject_of(request.param)
    first, *others = subject.ranks
    return [compared(subject, rank) for rank in (first, *others[-1:])]


def test_predicted_messages_equal_those_sent(compared_ranks: list[Compared]) -> None:
    """Kind, bytes, number, and the group: how many ranks, and how far apart."""
    for rank in compared_ranks:
        assert rank.called.total() > 0
        assert rank.unexplained == (Counter(), Counter())


def test_predicted_model_states_equal_those_allocated(compared_ranks: list[Compared]) -> None:
    for rank in compared_ranks:
        assert rank.states == rank.charged_states


def test_predicted_activations_equal_those_saved(compared_ranks: list[Compared]) -> None:
    for rank in compared_ranks:
        if rank.activations is not None:
            wanted = pytest.approx(rank.activations, rel=ACTIVATIONS_WITHIN)
            assert rank.charged_activations == wanted


def test_worlds_go_up_to_a_thousand_ranks() -> None:
    worlds = {subject_of(name).plan.world_size for name in PLANS}
    assert (min(worlds), max(worlds)) == (2, 1024)


@pytest.mark.parametrize("name", ["TP", "TP + DP", "TP + HSDP", "TP beyond key heads + ZeRO-3"])
def test_the_split_proposed_from_the_profile_is_the_proved_one(name: str) -> None:
    subject = subject_of(name)
    proposed = dict(proposed_styles(subject.profile, subject.plan.tp))
    assert proposed == dict(subject.plan.tensor_styles)


@pytest.mark.parametrize("name", ["TP", "TP, recompute"])
def test_sequence_parallelism_saves_less(name: str) -> None:
    """Of eight ranks each saves an eighth outside of split layers; under full recompute only that
    is left of a block."""
    without = subject_of(name)
    plan = without.plan.model_copy(update={"sequence_parallel": True})
    styles = subject_of("TP by tokens").plan.tensor_styles
    by_tokens = replace(without, plan=plan.model_copy(update={"tensor_styles": styles}))
    whole, split = compared(without, 0).activations, compared(by_tokens, 0).activations
    assert whole is not None
    assert split is not None
    assert split < 0.75 * whole
