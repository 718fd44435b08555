"""Decisions with pipeline stages, with split layers, and with both and replicas."""

from __future__ import annotations

import pytest

from advisor.decide.choose import choose
from advisor.decide.decision import Decision
from advisor.decide.sensitivity import Sensitivity
from advisor.decide.tree import Family, belongs
from advisor.inputs.changed_facts import Lever
from advisor.inputs.policy import Objective, Policy
from advisor.report.view import view_of
from advisor.search.ranking import beats
from engines.plan import PartialPlan
from tests.factories import facts, gpus, small_llama

SMALL = small_llama()


@pytest.fixture(scope="module")
def pipeline() -> Decision:
    """Slow links in the node, and a model of 0.9 GiB of states on devices with 0.7 GiB to spare."""
    return choose(facts(SMALL, gpus(1, 4, memory_gib=3.35, intra_bytes_per_s=1e9), batch=8))


def test_slow_links_and_a_model_that_does_not_fit_lead_to_a_pipeline(pipeline: Decision) -> None:
    assert pipeline.trace.leaf == "split-first"
    assert belongs(pipeline.plan, Family.PP)
    assert pipeline.plan.schedule is not None
    assert len(pipeline.plan.stages) >= pipeline.plan.pp - 1


def test_the_report_of_a_pipeline_explains_its_idle_time(pipeline: Decision) -> None:
    reason = next(r for r in pipeline.reasons if r.startswith("Its stages wait"))
    assert "microbatches in flight" in reason
    view = view_of(pipeline)
    assert view.title.startswith(f"PP over {pipeline.plan.pp}")
    assert "waiting for other stages" in {part.name for part in view.time_parts}
    parts = sum(part.share for part in view.time_parts)
    assert parts == pytest.approx(1, abs=0.01)


def test_alternatives_of_other_kinds_have_their_reasons(pipeline: Decision) -> None:
    titles = [alternative.title for alternative in pipeline.alternatives]
    assert any(title.startswith("TP over") for title in titles)
    assert len(set(titles)) == len(titles)
    assert all(alternative.because for alternative in pipeline.alternatives)


def test_a_decision_with_stages_and_styles_survives_its_file(pipeline: Decision) -> None:
    assert Decision.from_json(pipeline.to_json()) == pipeline
    split = choose(facts(SMALL, gpus(1, 2), batch=4), partial=PartialPlan(tp=2))
    assert Decision.from_json(split.to_json()) == split
    sent = next(r for r in split.reasons if r.startswith("Split layers send"))
    assert "over NVLink" in sent


def test_no_parameters_are_gathered_over_slow_links_between_nodes() -> None:
    whole = facts(SMALL, gpus(2, 2, memory_gib=3.1, inter_bytes_per_s=3e8), batch=8)
    decision = choose(whole)
    assert decision.trace.leaf == "everything"
    families = (Family.DP_PP_TP_ZERO1, Family.HSDP)
    assert any(belongs(decision.plan, family) for family in families)
    fastest = choose(whole, policy=Policy(objective=Objective.TIME))
    assert fastest.estimate.step_s <= decision.estimate.step_s
    is_beaten = beats(fastest.chosen, decision.chosen, Policy())
    assert (decision.dissent is not None) == is_beaten


def test_a_faster_link_turns_a_pipeline_into_another_plan(pipeline: Decision) -> None:
    sensitivity: Sensitivity = pipeline.flip(Lever.LINKS_IN_NODE)
    (turn,) = sensitivity.turns
    assert turn.factor > 1
    assert turn.before.startswith("PP")
    assert turn.after != turn.before
