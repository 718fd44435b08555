"""Plans that ran out of memory, and the machine that they say it was: figures by hand."""

from __future__ import annotations

import pytest

from advisor.cost import estimate
from advisor.learning.shortages import below, failed_plan
from engines.plan import Plan
from tests.factories import facts, gpus, transformer

GIB = 2**30
PLAN = Plan.parse("dp_replicate=16 microbatch_size=8 precision=bf16")
FACTS = facts(transformer(layers=2, hidden=1024, ffn=2816), gpus(2, 8, memory_gib=40))


def test_what_a_failed_plan_lacked_is_charged_to_processes_and_what_it_needed_is_not_there() -> (
    None
):
    predicted = estimate(PLAN, FACTS).peak_bytes
    needed = predicted + 3 * GIB
    assert needed < FACTS.cluster.device.memory_bytes.value
    after = below(FACTS, [failed_plan(PLAN, FACTS, needed_bytes=needed)])
    before, device = FACTS.cluster.device, after.cluster.device
    assert device.memory_bytes.value == needed
    assert device.context_bytes.value == pytest.approx(before.context_bytes.value + 3 * GIB)
    assert estimate(PLAN, after).peak_bytes == pytest.approx(needed)
    shortage, charged = after.cluster.notes[-2:]
    assert f"`{PLAN}` ran out of memory here" in shortage
    assert "charged 3.00 GiB that plans which failed here lacked" in charged


def test_a_plan_that_needed_no_more_than_predicted_lowers_the_memory_alone() -> None:
    needed = estimate(PLAN, FACTS).peak_bytes - GIB
    after = below(FACTS, [failed_plan(PLAN, FACTS, needed_bytes=needed)])
    assert after.cluster.device.memory_bytes.value == needed
    assert after.cluster.device.context_bytes == FACTS.cluster.device.context_bytes


def test_a_plan_that_needed_more_than_there_is_charges_what_it_lacked() -> None:
    predicted = estimate(PLAN, FACTS).peak_bytes
    needed = FACTS.cluster.device.memory_bytes.value + GIB
    after = below(FACTS, [failed_plan(PLAN, FACTS, needed_bytes=needed)])
    before, device = FACTS.cluster.device, after.cluster.device
    assert device.memory_bytes == before.memory_bytes
    assert device.context_bytes.value == pytest.approx(
        before.context_bytes.value + needed - predicted
    )


def test_without_failures_facts_stay_as_they_are() -> None:
    assert below(FACTS, []) is FACTS
