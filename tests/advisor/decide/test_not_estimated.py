"""A bug in the estimate of one plan loses only that plan, and is logged."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from advisor.cost import CostModel, Estimate
from advisor.decide.choose import choose
from advisor.report.view import view_of
from advisor.search import search
from advisor.search.ranking import Candidate
from engines.plan import DataParallel, PartialPlan, Plan
from profiles.errors import InputError
from tests.factories import facts, gpus, small_llama, transformer

MIDDLE = transformer(name="middle", layers=8, hidden=2048, ffn=5504, tokens=4096)


def failing(monkeypatch: pytest.MonkeyPatch, of: Callable[[Plan], bool], error: Exception) -> None:
    estimate = CostModel.estimate

    def broken(self: CostModel, plan: Plan) -> Estimate:
        if of(plan):
            raise error
        return estimate(self, plan)

    monkeypatch.setattr(CostModel, "estimate", broken)


def test_the_decision_is_that_of_all_other_plans(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = facts(MIDDLE, gpus(1, 8), batch=64)
    before = choose(whole)
    assert before.plan.data_parallel is DataParallel.ZERO1
    assert "not-estimated" not in before.rejected
    without = choose(whole, partial=PartialPlan.build({"data_parallel": "zero2"}))
    lost = (DataParallel.ZERO1, DataParallel.HYBRID_SHARD)
    failing(monkeypatch, lambda plan: plan.data_parallel in lost, ZeroDivisionError("a mistake"))
    with caplog.at_level(logging.WARNING, "advisor"):
        after = choose(whole)
    assert after.plan == without.plan
    assert after.rejected["not-estimated"] > 0
    assert f"{after.rejected['not-estimated']} by `not-estimated`" in view_of(after).weighed
    (record,) = [r for r in caplog.records if "could not be estimated" in r.message]
    assert "ZeroDivisionError: a mistake" in record.message
    assert not record.exc_info


def test_debug_logging_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing(monkeypatch, lambda plan: plan.tp > 1, KeyError("a mistake"))
    with caplog.at_level(logging.DEBUG, "advisor"):
        choose(facts(small_llama(), gpus(1, 4), batch=8))
    (record,) = [r for r in caplog.records if "could not be estimated" in r.message]
    assert record.exc_info is not None
    assert record.exc_info[0] is KeyError


def test_errors_of_the_user_are_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, lambda plan: plan.dp_shard > 1, InputError("no such thing"))
    with pytest.raises(InputError, match="no such thing"):
        choose(facts(MIDDLE, gpus(1, 8), batch=64))


def test_where_no_plan_can_be_estimated_an_error_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> Candidate:
        raise KeyError("a mistake")

    monkeypatch.setattr(search, "judged", broken)
    with pytest.raises(RuntimeError, match="none of the plans could be estimated"):
        choose(facts(MIDDLE, gpus(1, 8), batch=64))
