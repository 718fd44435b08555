"""The Pareto front, against every pair of plans compared by brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.cost import CostModel, Estimate
from advisor.decide.candidates import legal_plans
from advisor.decide.choose import choose
from advisor.inputs.policy import Policy
from advisor.inputs.resize import on
from advisor.search.ranking import Candidate, Finding, weigh
from advisor.whatif.pareto import HOUR_S, front
from engines.plan import PartialPlan, Plan
from tests.factories import facts, gpus, transformer

MIDDLE = transformer(name="middle", layers=8, hidden=2048, ffn=5504, tokens=4096)
WHOLE = facts(MIDDLE, gpus(1, 8), batch=64)
WEIGHED = weigh(legal_plans(WHOLE, PartialPlan()), CostModel(WHOLE), Policy())


def made(step_s: float, memory: float, devices: int) -> Candidate:
    estimate: Estimate = WEIGHED[0].estimate.model_copy(
        update={"step_s": step_s, "peak_high_bytes": memory}
    )
    return Candidate(Plan(dp_replicate=devices, microbatch_size=1), estimate)


def goods(candidate: Candidate) -> tuple[float, float, float]:
    step_s = candidate.estimate.step_s
    return step_s, candidate.estimate.peak_high_bytes, step_s * candidate.plan.world_size


def undominated(candidates: list[Candidate]) -> set[tuple[float, float, float]]:
    """Apply the definition: no other plan is at least as good in all and better in one."""
    every = [goods(c) for c in candidates]
    return {
        mine
        for mine in every
        if not any(
            other != mine and all(o <= m for o, m in zip(other, mine, strict=True))
            for other in every
        )
    }


small = st.integers(1, 5)


@given(st.lists(st.builds(made, small.map(float), small.map(float), small), max_size=25))
def test_the_front_is_the_set_of_undominated_candidates(candidates: list[Candidate]) -> None:
    points = front(candidates)
    seen = {(p.step_s, p.peak_high_bytes, p.device_seconds) for p in points}
    assert seen == undominated(candidates)
    assert len(points) == len(seen)  # one of equal plans is kept


def test_the_front_of_real_plans_is_their_undominated_set() -> None:
    fitting = [c for c in WEIGHED if c.fits]
    points = front(WEIGHED)
    assert {(p.step_s, p.peak_high_bytes, p.device_seconds) for p in points} == undominated(fitting)
    assert points[0].step_s == min(c.estimate.step_s for c in fitting)
    smallest = min(c.estimate.peak_high_bytes for c in fitting)
    assert points[-1].peak_high_bytes == smallest
    assert 1 < len(points) < len(fitting)


def test_on_the_same_devices_cost_follows_time() -> None:
    assert len(front([made(1.0, 5.0, 8), made(2.0, 5.0, 8)])) == 1


def test_fewer_devices_are_on_the_front_with_more_time_and_memory() -> None:
    """Eight devices 1 s, or two devices 3 s: 8 device-seconds against 6."""
    fast, cheap = front([made(1.0, 5.0, 8), made(3.0, 6.0, 2)], price_per_device_hour=HOUR_S)
    assert (fast.device_seconds, cheap.device_seconds) == (8.0, 6.0)
    assert (fast.money, cheap.money) == (8.0, 6.0)
    assert fast.because == "the fastest: 1.00 s a step"
    assert cheap.because == (
        "2.00 s less device-time than DDP over 8, for 2.00 s more a step and 1 B more memory"
    )


def test_plans_of_one_title_are_distinguished_by_their_microbatches() -> None:
    fast, small = made(1.0, 5.0, 8), made(2.0, 4.0, 8)
    recut = Candidate(fast.plan.model_copy(update={"accumulation": 2}), small.estimate)
    assert front([fast, recut])[1].because.startswith("1 B less memory than with mb 1, for ")


def test_money_is_unknown_without_a_price() -> None:
    assert front([made(1.0, 5.0, 8)])[0].money is None


def test_plans_that_do_not_fit_are_not_on_the_front() -> None:
    lacking = made(1.0, 5.0, 8)
    finding = Finding(rule="fits-device", because="does not fit")
    refused = Candidate(lacking.plan, lacking.estimate, finding)
    assert front([refused]) == ()


def test_of_equal_plans_the_simpler_is_kept() -> None:
    simple = made(1.0, 5.0, 8)
    sharded = Candidate(Plan(dp_shard=8, microbatch_size=1), simple.estimate)
    assert [p.title for p in front([sharded, simple])] == ["DDP over 8"]


@pytest.mark.parametrize("point", front(WEIGHED)[1:], ids=lambda p: p.title)
def test_each_point_states_its_gain_and_its_cost(point: object) -> None:
    because = getattr(point, "because", "")
    assert "less memory" in because
    assert " more a step" in because


def test_a_decision_gives_the_front_of_its_plans() -> None:
    assert choose(WHOLE).pareto() == front(WEIGHED)


def test_plans_on_fewer_devices_are_on_the_front_where_they_cost_less() -> None:
    """Eight devices exchange gradients; one does not, so it costs fewest device-seconds."""
    points = choose(WHOLE).pareto(devices=(1, 2, 4), price_per_device_hour=2.0)
    every = [
        candidate
        for count in (1, 2, 4, 8)
        for candidate in weigh(
            legal_plans(on(WHOLE, count), PartialPlan()), CostModel(on(WHOLE, count)), Policy()
        )
        if candidate.fits
    ]
    seen = {(p.step_s, p.peak_high_bytes, p.device_seconds) for p in points}
    assert seen == undominated(every)
    cheapest = min(points, key=lambda p: p.device_seconds)
    assert cheapest.plan.world_size == 1
    assert cheapest.money == pytest.approx(2.0 * cheapest.step_s / 3600)
