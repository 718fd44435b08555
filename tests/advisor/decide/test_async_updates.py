"""Local and asynchronous updates: when they are compared, offered and chosen."""

from __future__ import annotations

import numpy as np
import pytest

from advisor.cost import estimate
from advisor.decide.async_updates import risk, settings
from advisor.decide.choose import choose, offer
from advisor.decide.decision import Decision
from advisor.decide.refinements import REFINEMENTS, Deciding
from advisor.decide.tree import Family, belongs
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Objective, Policy
from advisor.search.ranking import Candidate
from engines.plan import PartialPlan, Plan, Updates
from profiles.errors import PlanError
from tests.factories import facts, gpus, transformer

MIDDLE = transformer(name="middle", layers=8, hidden=2048, ffn=5504, tokens=4096)
ALLOWED = Policy(allow_stale=True)


def slow(batch: int = 64, *, inter: float = 5e8) -> Facts:
    """Two nodes of four behind half a gigabyte a second; the model fits a device."""
    return facts(MIDDLE, gpus(2, 4, inter_bytes_per_s=inter), batch=batch)


def uneven(imbalance: float) -> Facts:
    """One node of eight whose ranks differ in speed."""
    inputs = facts(MIDDLE, gpus(1, 8), batch=168)
    workload = inputs.workload.model_copy(update={"imbalance": imbalance})
    return inputs.model_copy(update={"workload": workload})


def report_of(decision: Decision) -> str:
    return " ".join(str(decision).split())


def test_diloco_over_slow_links_is_offered_with_its_gain_and_risk_but_not_chosen() -> None:
    decision = choose(slow())
    assert decision.plan.updates_in_step
    (said,) = (offer for offer in decision.offers if "--allow-stale" in offer)
    assert said in report_of(decision)
    offered = Plan.parse(str(decision.plan) + " updates=diloco sync_every=500")
    gain = decision.estimate.step_s / estimate(offered, decision.facts).step_s
    assert said.startswith(f"updates=diloco sync_every=500 is predicted {gain:.1f} times as fast")
    assert gain > 5
    assert "which changes the training" in said
    assert said.endswith("only `--allow-stale` (`allow_stale=True`) takes it")


def test_allow_stale_chooses_diloco_and_the_report_states_the_risk() -> None:
    decision = choose(slow(), policy=ALLOWED)
    plan = decision.plan
    assert (plan.updates, plan.sync_every, plan.dp_replicate) == (Updates.DILOCO, 500, 8)
    assert decision.offers == ()
    report = report_of(decision)
    assert "DiLoCo over 8 every 500 steps" in report
    assert "replicas diverge for 500 steps, which changes the training" in report
    assert "language models on 8 workers lost nothing at 500 (Douillard et al. 2023)" in report
    assert "not weighed yet" not in report


def test_of_equally_fast_plans_the_one_that_synchronizes_most_often_is_chosen() -> None:
    """At ten times the bandwidth 100 steps hide the traffic as well as 500, at sixty times 16."""
    assert choose(slow(inter=5e9), policy=ALLOWED).plan.sync_every == 100
    taken = choose(slow(inter=30e9), policy=ALLOWED).plan
    assert taken.updates_in_step or taken.sync_every <= 16


def test_fast_links_leave_nothing_to_offer() -> None:
    assert choose(facts(MIDDLE, gpus(2, 4), batch=64)).offers == ()
    assert choose(facts(MIDDLE, gpus(1, 8), batch=64), policy=ALLOWED).plan.updates_in_step


def test_measured_stragglers_are_a_reason_for_asynchronous_updates() -> None:
    """Of eight ranks the slowest is 1.42 deviations late: with 40 % that is more than half a step.
    A backup worker helps, and so do local steps, whose summed times vary less."""
    assert choose(uneven(0.0)).offers == ()
    decision = choose(uneven(0.4))
    (said,) = decision.offers
    assert "waiting for the slowest rank" in report_of(decision)
    assert said.startswith(("updates=", "servers="))
    taken = choose(uneven(0.4), policy=ALLOWED)
    assert not taken.plan.updates_in_step
    assert taken.estimate.time.straggling_s < decision.estimate.time.straggling_s / 1.9
    assert "asynchronous or periodic updates were allowed" in report_of(taken)


@pytest.mark.parametrize(
    "words",
    [
        "updates=local sync_every=8",
        "updates=diloco sync_every=64",
        "updates=asynchronous servers=4",
        "servers=4",
    ],
)
def test_updates_given_in_the_plan_need_no_allow_stale(words: str) -> None:
    decision = choose(slow(), partial=PartialPlan.parse(words))
    assert settings(decision.plan) == words
    assert decision.plan.world_size == 8
    assert risk(decision.plan) in report_of(decision)
    assert decision.offers == ()


@pytest.mark.parametrize(("words", "delay"), [("dp_replicate=2", 1), ("dp_replicate=8", 7)])
def test_the_stated_learning_rate_limit_is_where_stale_descent_diverges(
    words: str, delay: int
) -> None:
    """x <- x - a x, with x of `delay` updates ago: a root of z^(d+1) - z^d + a leaves the unit
    circle at the largest stable a; of fresh gradients that is 2."""
    plan = Plan.parse(f"{words} servers=1 updates=asynchronous")
    said = risk(plan)
    assert f"gradients are about {delay} updates old" in said
    share = float(said.rpartition("learning rate is ")[2].split()[0])

    def largest_root(step: float) -> float:
        return float(abs(np.roots([1.0, -1.0, *[0.0] * (delay - 1), step])).max())

    # Said in two digits.
    assert largest_root(2 * 0.95 * share) < 1 < largest_root(2 * 1.05 * share)


def test_why_not_local_steps_is_answered_with_numbers() -> None:
    answer = choose(slow()).why_not("updates=local sync_every=16")
    assert answer.plan is not None
    assert answer.plan.updates is Updates.LOCAL
    assert answer.estimate is not None


def test_impossible_updates_are_refused_with_the_reason() -> None:
    with pytest.raises(PlanError) as caught:
        choose(slow(), partial=PartialPlan.build({"updates": "asynchronous"}))
    assert "asynchronous updates need a server that applies them" in str(caught.value)
    with pytest.raises(PlanError) as caught:
        choose(slow(), partial=PartialPlan.build({"updates": "local", "sync_every": 4, "zero": 1}))
    assert "needs the whole model on every rank" in str(caught.value)
    with pytest.raises(PlanError) as caught:
        choose(slow(batch=64), partial=PartialPlan(servers=1))
    assert "does not divide over 7 replicas" in str(caught.value)


def test_the_memory_objective_never_chooses_asynchronous_updates() -> None:
    policy = Policy(allow_stale=True, objective=Objective.MEMORY)
    assert choose(slow(), policy=policy).plan.updates_in_step


def test_local_sgd_is_the_family_of_local_steps_and_not_of_servers() -> None:
    local = Plan.parse("dp_replicate=8 updates=local sync_every=8")
    served = Plan.parse("dp_replicate=7 servers=1")
    assert {f for f in Family if belongs(local, f)} == {Family.LOCAL_SGD}
    assert {f for f in Family if belongs(served, f)} == set()


def test_offers_survive_the_file_of_a_decision() -> None:
    decision = choose(slow())
    again = Decision.from_json(decision.to_json())
    assert again.offers == decision.offers
    local = Candidate(
        decision.plan.model_copy(update={"updates": Updates.LOCAL}), decision.estimate
    )
    assert offer(local, decision.chosen).count("1.0 times as fast") == 1


def test_a_plan_that_ties_with_the_winner_of_all_refinements_is_not_offered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fastest = []

    def offers_the_fastest(deciding: Deciding) -> None:
        assert deciding.fastest is not None
        fastest.append(deciding.fastest)
        deciding.offered.append(deciding.fastest)

    monkeypatch.setattr("advisor.decide.decide.REFINEMENTS", (*REFINEMENTS, offers_the_fastest))
    fast_links = facts(MIDDLE, gpus(2, 4), batch=64)
    decision = choose(fast_links, policy=Policy(simplicity_margin=0.5))
    assert fastest[-1].estimate.step_s < decision.estimate.step_s
    assert not decision.offers


def test_the_risk_of_a_plan_is_what_its_updates_change() -> None:
    assert risk(Plan.parse("dp_replicate=4")) == "updates are the same as DDP's"
    backup = Plan.parse("dp_replicate=4 backup_workers=2 aggregation=gather servers=1")
    assert "the last 2 of 6 gradients of a step are dropped" in risk(backup)
