"""Plans that the tree passes over: the fastest is found, and shown if it beats the choice."""

from __future__ import annotations

import pytest

from advisor.cost import CostModel
from advisor.decide.candidates import legal_plans, searched
from advisor.decide.choose import choose
from advisor.decide.comparison import title
from advisor.decide.tree import in_leaf
from advisor.decide.walk import walk
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Objective, Policy
from advisor.search.cache import SearchCache
from advisor.search.legal import Styles, expert_degrees
from advisor.search.ranking import beats, fastest_first, weigh
from engines.plan import PartialPlan, Plan
from profiles.machine.cluster import ClusterProfile
from profiles.provenance import Quantity, Source
from profiles.units import format_seconds
from tests.factories import facts, gpus, small_llama
from tests.nightly import nightly
from tests.regret.cases import CASES
from tests.regret.decided import facts_of, proved_styles
from tests.regret.report import REPORT, Report

SMALL = small_llama()
QUESTIONS = {
    "DDP over slow links": facts(SMALL, gpus(2, 2, inter_bytes_per_s=1e8), batch=8),
    "DDP over fast links": facts(SMALL, gpus(2, 2), batch=16),
    "stages of a node": facts(SMALL, gpus(1, 4, memory_gib=3.35, intra_bytes_per_s=1e9), batch=8),
}
# Four nodes of four: shards of some pipelines stay in a node, those of others do not.
NODES = facts(SMALL, gpus(4, 4, memory_gib=3.1, inter_bytes_per_s=3e8), batch=16)


def assert_nothing_faster_is_missed(whole: Facts, styles: Styles | None = None) -> str | None:
    """Compare a decision with all legal plans, each estimated; return the dissent."""
    costs, policy = CostModel(whole), Policy()
    plans = [
        plan
        for ep in expert_degrees(whole, PartialPlan())
        for plan in legal_plans(
            whole, PartialPlan(ep=ep) if ep > 1 else PartialPlan(), styles=styles, costs=costs
        )
    ]
    decision = choose(whole, styles=styles)
    fitting = [c for c in weigh(plans, costs, policy) if c.fits]
    fastest = min(fitting, key=fastest_first)
    if not beats(fastest, decision.chosen, policy):
        is_taken = whole.cluster.is_timed and not in_leaf(decision.plan, decision.trace)
        assert (decision.dissent is not None) == is_taken
        return decision.dissent
    assert not in_leaf(fastest.plan, decision.trace), "a faster plan of the leaf was not taken"
    assert decision.dissent is not None, str(fastest.plan)
    seconds = format_seconds(fastest.estimate.step_s)
    assert decision.dissent.startswith(f"{title(fastest.plan)} is predicted ")
    assert f"faster ({seconds})" in decision.dissent
    assert fastest.plan in [other.plan for other in decision.alternatives]
    return decision.dissent


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_choice_or_its_dissent_is_the_fastest_of_all_plans(name: str) -> None:
    assert_nothing_faster_is_missed(QUESTIONS[name])


@pytest.mark.parametrize(
    "name",
    ["gpt-small, 2x2 300 Mbit, all", *nightly("t5, 2x2 1 Gbit, all", "huge-layer, 1x4, layer")],
)
def test_the_same_on_machines_that_were_benched(name: str) -> None:
    case, result = CASES[name], Report.load(REPORT).result(name)
    if result is None:
        pytest.skip("the case is not in the report")
    whole = facts_of(case, result.cluster)
    assert_nothing_faster_is_missed(whole, proved_styles(case, whole))


def as_timed(cluster: ClusterProfile) -> ClusterProfile:
    """The same rates, as if a bench had measured them."""

    def timed(quantity: Quantity) -> Quantity:
        return quantity.model_copy(update={"source": Source.MEASURED})

    links = {
        name: link.model_copy(update={"bandwidth_bytes_per_s": timed(link.bandwidth_bytes_per_s)})
        for name in ("intra", "inter")
        if (link := getattr(cluster, name)) is not None
    }
    device = cluster.device
    device = device.model_copy(update={"matmul_fraction": timed(device.matmul_fraction)})
    return cluster.model_copy(update={"device": device, **links})


def test_the_tree_is_followed_unless_its_own_machines_were_timed() -> None:
    """Replicas over slow links take hundreds of times a pipeline's step, which is said on a data
    sheet's rates and taken on measured ones."""
    known = QUESTIONS["DDP over slow links"]
    advised = choose(known)
    timed = choose(known.model_copy(update={"cluster": as_timed(known.cluster)}))
    by_time = choose(known, policy=Policy(objective=Objective.TIME))
    assert in_leaf(advised.plan, advised.trace)
    assert advised.dissent is not None
    assert advised.dissent.endswith("`--objective time` takes it")
    assert not in_leaf(timed.plan, timed.trace)
    assert timed.estimate.step_high_s < advised.estimate.step_s
    assert timed.estimate.step_s <= 1.05 * by_time.estimate.step_s
    assert timed.dissent is not None
    assert timed.dissent.endswith("it is taken, as speed and links were timed here")
    assert any(title(advised.plan) in reason for reason in timed.reasons)


def test_the_tree_is_followed_where_the_gain_is_inside_its_range() -> None:
    """A pipeline spares a DDP plan its messages. A link that may be much faster than it was timed
    makes that uncertain; a processor that may be slower is slower for both."""
    cluster = as_timed(gpus(2, 2, inter_bytes_per_s=25e9))
    device, inter = cluster.device, cluster.inter
    assert inter is not None

    def doubted(quantity: Quantity) -> Quantity:
        return quantity.model_copy(update={"relative_error": 0.95})

    names = ("matmul_fraction", "launch_s")
    slow = device.model_copy(update={name: doubted(getattr(device, name)) for name in names})
    rate = doubted(inter.bandwidth_bytes_per_s)
    fast = inter.model_copy(update={"bandwidth_bytes_per_s": rate})
    taken, shared, cautious = (
        choose(facts(SMALL, cluster.model_copy(update=update), batch=8))
        for update in ({}, {"device": slow}, {"inter": fast})
    )
    assert not in_leaf(taken.plan, taken.trace)
    assert not in_leaf(shared.plan, shared.trace)
    assert in_leaf(cautious.plan, cautious.trace)
    assert cautious.dissent is not None
    assert cautious.dissent.endswith("`--objective time` takes it")


def test_a_difference_errs_by_what_one_plan_has_more_of_each_term() -> None:
    known = QUESTIONS["DDP over slow links"]
    costs = CostModel(known)
    one, other = (
        costs.estimate(Plan.parse(text))
        for text in ("dp_replicate=4 microbatch_size=2", "dp_shard=4 microbatch_size=2")
    )
    assert one.difference_error_s(one) == 0.0
    sent_s = other.time.exposed_s - one.time.exposed_s
    assert sent_s > 100 * abs(other.time.working_s - one.time.working_s)
    error = max(one.communication_error, other.communication_error)
    assert one.difference_error_s(other) == pytest.approx(error * sent_s, rel=0.01)
    assert other.difference_error_s(one) == one.difference_error_s(other)


def test_a_leaf_holds_the_rows_whose_own_plans_belong_to_it() -> None:
    cache = SearchCache(CostModel(NODES))
    search, trace = searched(cache, PartialPlan(), Policy()), walk(cache.costs, Policy())
    inside = search.where(lambda plan: in_leaf(plan, trace))
    assert trace.leaf == "everything"
    assert inside.any()
    assert not inside.all()
    plans = (search.space.plan(index) for index in range(len(search.space)))
    assert inside.tolist() == [in_leaf(plan, trace) for plan in plans]
