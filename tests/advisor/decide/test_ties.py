"""Ties: decision, rows, reasons and `why_not` use one limit, relative to the fastest plan."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from advisor.cost import CostModel
from advisor.decide.candidates import legal_plans
from advisor.decide.choose import choose
from advisor.decide.comparison import PlanVerdict
from advisor.decide.decide import decide
from advisor.decide.decision import Alternative, Decision
from advisor.decide.tree import in_leaf
from advisor.inputs.facts import Facts
from advisor.inputs.models import profile_model
from advisor.inputs.policy import Policy
from advisor.search.ranking import Candidate, simplicity, weigh
from engines.plan import PartialPlan
from profiles.machine.clusters import resolve_cluster
from profiles.model.profile import Numerics
from profiles.workload.workload import Workload
from tests.advisor.search.test_search import hybrids, situations
from tests.factories import facts, gpus, transformer

MARGIN = Policy().simplicity_margin
MIDDLE = transformer(name="middle", layers=8, hidden=2048, ffn=5504, tokens=4096)
SLOW = 4e9

# Few plans (all are estimated), many (most by their bounds alone), and paths through the tree.
QUESTIONS = {
    "one node": facts(MIDDLE, gpus(1, 8), batch=256),
    "one node, small batch": facts(MIDDLE, gpus(1, 8), batch=64),
    "two nodes": facts(),
    "slow network": facts(MIDDLE, gpus(2, 4, memory_gib=18, inter_bytes_per_s=SLOW), batch=64),
    "large": facts(transformer(name="70b", layers=80, hidden=8192, ffn=28672), gpus(8, 8)),
}


@pytest.fixture(scope="module", params=[*QUESTIONS, "gpt-7b on PCIe"])
def decision(request: pytest.FixtureRequest) -> Decision:
    if request.param in QUESTIONS:
        return choose(QUESTIONS[request.param])
    return choose(on_a6000())


def on_a6000() -> Facts:
    """19,065 plans over slow links in the node: pipelines, split layers and shards are close."""
    reduced = (Numerics.BF16, Numerics.BF16_AUTOCAST)
    model = profile_model("gpt-7b", samples=1, sequence_length=None, numerics=reduced)
    cluster = resolve_cluster("1x8xRTX-A6000-48GB")
    return Facts(
        model=model,
        cluster=cluster,
        workload=Workload(global_batch_size=256, precision="bf16"),
    )


def in_the_trees_leaf(other: Alternative, decision: Decision) -> bool:
    is_followed = in_leaf(decision.plan, decision.trace)
    return not is_followed or in_leaf(other.plan, decision.trace)


def agree(decision: Decision) -> None:
    """Assert that rows and reasons judge every plan by its distance to the fastest."""
    assert decision.fastest_s is not None
    limit_s = decision.fastest_s * (1 + MARGIN)
    mine = decision.estimate.step_s
    assert decision.fastest_s <= mine <= limit_s
    might: list[Alternative] = []
    for other in decision.alternatives:
        if other.step_s is None:
            assert other.verdict is PlanVerdict.NO_FIT
            continue
        is_of_leaf = in_the_trees_leaf(other, decision)
        is_tied = other.step_s <= limit_s
        wanted = PlanVerdict.SLOWER
        if is_tied:
            wanted = PlanVerdict.TIE if is_of_leaf else PlanVerdict.OUTSIDE
        assert other.verdict is wanted, other
        assert other.verdict is not PlanVerdict.RULED_OUT
        if is_of_leaf:
            assert other.step_s >= decision.fastest_s, "a row is faster than the fastest plan"
        if other.verdict is not PlanVerdict.OUTSIDE:
            might.append(other)
        if other.verdict is PlanVerdict.TIE:
            order = simplicity(other.plan), other.step_s
            assert order > (simplicity(decision.plan), mine), other
    others = [reason for reason in decision.reasons if "Runner-up" in reason or "a tie (" in reason]
    if not might:
        assert not others
        return
    second = min(might, key=lambda other: other.step_s or 0.0)
    (reason,) = others
    assert second.title in reason
    assert ("a tie (within 5.0% of the fastest plan)" in reason) == (
        second.verdict is PlanVerdict.TIE
    )
    assert (" faster" in reason) == ((second.step_s or 0.0) < mine)


def test_decision_rows_and_reasons_use_one_limit(decision: Decision) -> None:
    agree(decision)


def test_why_not_agrees_with_the_rows(decision: Decision) -> None:
    for other in decision.alternatives:
        plan = other.plan
        degrees = ("pp", "tp", "dp_replicate", "dp_shard", "data_parallel")
        asked = " ".join(f"{name}={getattr(plan, name)}" for name in degrees)
        answer = decision.why_not(asked)
        is_tied = {PlanVerdict.TIE, PlanVerdict.OUTSIDE, PlanVerdict.CHOSEN}
        assert (answer.verdict in is_tied) == (other.verdict in is_tied), (answer, other)
        assert (answer.verdict is PlanVerdict.NO_FIT) == (other.verdict is PlanVerdict.NO_FIT)


@settings(max_examples=8, deadline=None)
@given(whole=situations() | hybrids())
def test_the_choice_is_the_simplest_of_all_plans_within_the_margin_of_the_fastest(
    whole: Facts,
) -> None:
    if decide(whole, nearest=False).winner is None:
        return  # `choose` would search for remedies for seconds
    decision = choose(whole)
    if decision.plan.offload != "none":
        return
    agree(decision)
    # A chunked loss is searched by itself, where it may be what makes a plan fit.
    chunks = decision.plan.loss_chunks
    partial = PartialPlan(loss_chunks=chunks) if chunks > 1 else PartialPlan()
    every = [c for c in weigh(legal_plans(whole, partial), CostModel(whole), Policy()) if c.fits]
    of_leaf = [c for c in every if in_leaf(c.plan, decision.trace)] or every
    fastest_s = min(c.estimate.step_s for c in of_leaf)
    tied = [c for c in of_leaf if c.estimate.step_s <= fastest_s * (1 + MARGIN)]

    def order(candidate: Candidate) -> tuple[object, ...]:
        return simplicity(candidate.plan), candidate.estimate.step_s, str(candidate.plan)

    assert decision.plan == min(tied, key=order).plan
    assert decision.fastest_s == fastest_s


@pytest.mark.nightly
def test_a_tie_over_pcie_is_relative_to_the_fastest_plan() -> None:
    """A margin for each pair of plans took ZeRO-2, 20 % slower than the fastest plan."""
    decision = choose(on_a6000())
    assert decision.fastest_s is not None
    assert decision.estimate.step_s <= 1.05 * decision.fastest_s
    agree(decision)
