"""Ranges and rates of a step from its terms, by hand."""

from __future__ import annotations

import pytest

from advisor.cost import Estimate, estimate
from engines.plan import Plan
from profiles.machine.cluster import Overlap
from tests.factories import chain, datasheet, exact, facts, gpus

TOKENS = 512


def step(plan: str, slower: float) -> Estimate:
    """Four devices whose computing and messages take so many times as long at once, and launches
    longer than some kernels; half a second of the host and waiting in every step."""
    overlap = Overlap(computing=exact(slower), communication=exact(slower))
    machine = gpus(1, 4)
    device = machine.device.model_copy(update={"launch_s": datasheet(1e-4)})
    cluster = machine.model_copy(update={"overlap": overlap, "device": device})
    model = chain().model_copy(update={"tokens_per_sample": TOKENS})
    known = facts(model, cluster, batch=24, precision="fp32")
    more = {"imbalance": 0.1, "host_overhead_s": 0.5}
    workload = known.workload.model_copy(update=more)
    return estimate(Plan.parse(plan), known.model_copy(update={"workload": workload}))


@pytest.mark.parametrize(
    "plan",
    [
        "dp_replicate=4 microbatch_size=2 microbatches=3",
        "dp_shard=4 microbatch_size=2 microbatches=3 offload=states",
        "dp_shard=4 microbatch_size=2 microbatches=3 recompute=full",
    ],
)
def test_the_range_of_a_step_adds_the_doubt_of_each_term(plan: str) -> None:
    cost = step(plan, 1.0)
    time = cost.time
    working = time.compute_s + time.recompute_s + time.optimizer_s + time.straggling_s
    sent = time.exposed_s + time.host_s
    assert min(working, time.straggling_s, time.launch_s, sent) > 0
    assert min(cost.compute_error, cost.launch_error, cost.communication_error) > 0
    assert cost.step_s == pytest.approx(working + time.launch_s + sent + 0.5)
    for sign, end_s in ((-1, cost.step_low_s), (1, cost.step_high_s)):
        assert end_s == pytest.approx(
            working * (1 + sign * cost.compute_error)
            + time.launch_s * (1 + sign * cost.launch_error)
            + sent * (1 + sign * cost.communication_error)
            + 0.5
        )
    assert (time.host_s > 0) == ("offload" in plan)


def test_rates_are_those_of_all_replicas_and_of_the_work_that_was_asked_for() -> None:
    """24 samples; 6 FLOP a token and parameter of the model, at 67 TFLOP/s on each device."""
    for more in ("", " recompute=full"):
        cost = step(f"dp_shard=4 microbatch_size=2 microbatches=3{more}", 1.0)
        assert cost.samples_per_s == pytest.approx(24 / cost.step_s)
        assert cost.tokens_per_s == pytest.approx(24 * TOKENS / cost.step_s)
        flop = 6 * TOKENS * 4_000_000 * 24 / 4
        assert cost.mfu == pytest.approx(flop / cost.step_s / 67e12)


def test_what_overlaps_is_slower_by_what_was_measured() -> None:
    """At twice the time each, a second of overlap is a second lost."""
    plan = "dp_replicate=4 microbatch_size=2 microbatches=3"
    free, slowed = step(plan, 1.0), step(plan, 2.0)
    assert free.time.overlapped_s > 0
    more = slowed.time.exposed_s - free.time.exposed_s
    assert more == pytest.approx(free.time.overlapped_s)
    assert slowed.step_high_s - free.step_high_s == pytest.approx(free.time.overlapped_s)
