"""Search: what branch and bound finds is what weighing every plan finds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.comparison import nearest_miss
from advisor.cost import CostModel
from advisor.facts import Facts
from advisor.policy import Objective, Policy
from advisor.rules import Candidate, preferred, simplicity, weigh
from advisor.search.legal import space_of, styles_of
from advisor.search.search import ROUNDING, Search
from advisor.search.stages import Stages
from engines.plan import Offload
from tests.factories import chain, cpus, facts, gpus, transformer

MIDDLE = transformer(name="middle", layers=6, hidden=2048, ffn=5504, tokens=4096)


def searched(whole: Facts, policy: Policy, offload: Offload = Offload.NONE) -> Search:
    space = space_of(whole, {}, styles=styles_of(whole), offload=offload)
    costs = CostModel(whole)
    return Search(costs, policy, space, Stages(costs, {}))


def all_of(search: Search, whole: Facts, policy: Policy) -> list[Candidate]:
    costs = CostModel(whole)
    stages = Stages(costs, {})
    plans = [stages.plan(search.space, index) for index in range(len(search.space))]
    return weigh(plans, costs, policy)


@st.composite
def situations(draw: st.DrawFn) -> Facts:
    nodes, devices = draw(st.integers(1, 2)), draw(st.sampled_from((1, 2, 3, 4, 8)))
    local = draw(st.integers(1, 12))
    if draw(st.integers(0, 5)) == 0:
        return facts(chain(units=5), cpus(devices), batch=devices * local, precision="fp32")
    memory_gib = draw(st.floats(14, 120))
    inter = draw(st.sampled_from((2e9, 25e9, 400e9)))
    cluster = gpus(nodes, devices, memory_gib=memory_gib, inter_bytes_per_s=inter)
    return facts(MIDDLE, cluster, batch=nodes * devices * local)


@settings(max_examples=40, deadline=None)
@given(whole=situations(), offload=st.sampled_from(Offload))
def test_no_estimate_is_below_its_bound(whole: Facts, offload: Offload) -> None:
    policy = Policy()
    search = searched(whole, policy, offload)
    bounds = search.bounds
    for index, candidate in enumerate(all_of(search, whole, policy)):
        found, time = candidate.estimate, candidate.estimate.time
        high = found.peak_high_bytes
        assert bounds.peak_high_bytes[index] <= high * (1 + ROUNDING), str(candidate.plan)
        rounding = ROUNDING * found.step_s
        for bound, value in (
            (bounds.step_s, found.step_s),
            (bounds.compute_s, time.compute_s),
            (bounds.recompute_s, time.recompute_s),
            (bounds.optimizer_s, time.optimizer_s),
            (bounds.launch_s, time.launch_s),
            (bounds.exposed_s, time.exposed_s),
        ):
            assert bound[index] <= value + rounding, str(candidate.plan)


@settings(max_examples=60, deadline=None)
@given(
    whole=situations(),
    objective=st.sampled_from(Objective),
    margin=st.sampled_from((0.0, 0.05, 0.3)),
)
def test_the_preferred_plan_is_that_of_weighing_them_all(
    whole: Facts, objective: Objective, margin: float
) -> None:
    policy = Policy(objective=objective, simplicity_margin=margin)
    search = searched(whole, policy)
    every = all_of(search, whole, policy)
    fitting = [candidate for candidate in every if candidate.fits]
    found = search.preferred(search.rows)
    if not fitting:
        assert found is None
        assert search.nearest(search.rows) == nearest_miss(every)
        return
    assert found == preferred(fitting, policy)


def test_rows_are_as_simple_as_their_plans() -> None:
    whole = facts(MIDDLE, gpus(2, 4), batch=32)
    search = searched(whole, Policy())
    for index, candidate in enumerate(all_of(search, whole, Policy())):
        assert simplicity(search.space.row(index)) == simplicity(candidate.plan)
