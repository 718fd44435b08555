"""Layers with gathered outputs: where code refuses a share of its features, the engine takes them,
and an estimate charges what they send and what every rank then keeps whole."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from advisor.cost.model import CostModel
from profiles.machine.cluster import Collective
from tests.contract.hybrids import ROWS, Subject, compared, subject_of
from tests.contract.watch import facts_of


def gathered(name: str) -> Subject:
    """The subject with the column and row layers of its blocks gathered."""
    subject = subject_of(name)
    styles = {
        pattern: "gather" if pattern.startswith("blocks") else style
        for pattern, style in subject.plan.tensor_styles
    }
    plan = subject.plan.model_copy(update={"tensor_styles": tuple(styles.items())})
    return replace(subject, plan=plan)


@pytest.mark.parametrize("name", ["TP", "TP, recompute", "PP + TP"])
def test_messages_states_and_activations_of_gathered_layers_are_charged(name: str) -> None:
    subject = gathered(name)
    for rank in subject.ranks:
        comparison = compared(subject, rank)
        assert any(kind is Collective.ALL_GATHER for kind, *_ in comparison.called)
        assert comparison.unexplained == (Counter(), Counter())
        assert comparison.states == comparison.charged_states
        if comparison.activations is not None:
            assert comparison.charged_activations == pytest.approx(comparison.activations, rel=0.02)


def test_gathered_outputs_cost_time_and_memory_over_pairs() -> None:
    """A gathered layer keeps its whole output where a column layer keeps a share, and every one
    sends it, where of a pair the row layer alone does."""
    pairs, whole = subject_of("TP"), gathered("TP")
    first, second = (
        CostModel(facts_of(subject.plan, subject.profile)).estimate(subject.plan)
        for subject in (pairs, whole)
    )
    assert second.step_s > first.step_s
    assert second.peak_bytes > first.peak_bytes
    sent = [item for item in second.traffic if item.purpose == "gathered outputs"]
    block = next(unit for unit in whole.profile.units if unit.is_block)
    layers = next(iter(block.costs.values())).layers
    blocks = sum(unit.is_block for unit in whole.profile.units)
    outputs = sum(layer.output_bytes.at(ROWS) for layer in layers)
    assert sum(item.count * item.payload_bytes for item in sent) == blocks * outputs
    assert all(item.seconds > 0 for item in sent)
