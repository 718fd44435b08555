"""A publisher's score depends on none of its own figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.scorecard.left_out import (
    LEAST_RESIDUALS,
    Residual,
    fits_without,
    left_out,
    ranges,
    ranges_without,
    unseen,
)
from tests.scorecard.made_up import MODEL, Device, reading, rule, rules, runs
from tests.scorecard.model import Model
from tests.scorecard.published import Published
from tests.scorecard.rules import Rules
from tests.scorecard.score import Scored

FAST, SLOW = Device(flop_per_s=2e14), Device(flop_per_s=5e13)
# Two files of one publisher run on a slow device, two others on a fast one.
RULES = rules()


def files(own: Device, *, own_slower: Sequence[float] = (1.0,)) -> list[Published]:
    results = [run for name in ("a1", "a2") for run in runs(name, own, slower=own_slower)]
    results += runs("b", FAST, slower=(0.8, 1.0, 1.25))
    return results + runs("c", FAST, slower=(0.9, 1.0, 1.1))


def scores(given: Sequence[Published], used: Rules = RULES, model: Model = MODEL) -> list[Scored]:
    constants = fits_without(model, used, given)
    return left_out(model, used, given, constants, ranges_without(model, used, given, constants))


def of(publisher: str, rows: Sequence[Scored]) -> list[Scored]:
    return [row for row in rows if RULES.publisher(row.run.file) == publisher]


def test_both_files_of_a_publisher_are_left_out_together() -> None:
    without = fits_without(MODEL, RULES, files(SLOW))
    assert without["A"].flop_per_s == pytest.approx(FAST.flop_per_s, rel=0.02)
    # The slow ones are half of the rest: without them alone is the rate that of fast devices.
    assert without["B"].flop_per_s < 0.9 * FAST.flop_per_s


def test_figures_of_a_publisher_move_nothing_that_scores_it() -> None:
    usual = scores(files(FAST))
    changed = scores(files(FAST, own_slower=(4.0,)))
    for one, other in zip(of("A", usual), of("A", changed), strict=True):
        assert (one.time, one.memory) == (other.time, other.memory)
        assert one.run.step_s != other.run.step_s
    # They do move what scores others.
    assert [row.time for row in of("B", usual)] != [row.time for row in of("B", changed)]


def test_ranges_are_quantiles_of_others() -> None:
    rows = of("A", scores(files(FAST)))
    for row in rows:
        assert row.time is not None
        # B's own spread, wider than C's, gives the ends.
        assert row.time.low / row.time.value == pytest.approx(0.8, rel=0.03)
        assert row.time.high / row.time.value == pytest.approx(1.25, rel=0.03)
    for row in of("B", scores(files(FAST))):
        assert row.time is not None
        assert row.time.high / row.time.value == pytest.approx(1.1, rel=0.03)


def test_a_kind_of_stack_has_its_own_ranges_where_others_ran_enough_of_it() -> None:
    given = runs("a1", FAST, attention="flash")
    given += runs("b", FAST, slower=(0.5, 2.0), attention="flash")
    given += runs("c", FAST, slower=(0.9, 1.0, 1.1))
    constants = dict.fromkeys(("A", "B", "C", "A+B", "A+C", "B+C"), FAST)
    spans = ranges_without(MODEL, RULES, given, constants)
    assert spans["A"]["time"]["flash"] == pytest.approx((0.5, 2.0))
    # Without B only A ran it, and its rows are not too few.
    assert spans["B"]["time"]["flash"] == pytest.approx((1.0, 1.0))
    assert spans[""]["time"]["eager"] == pytest.approx((0.9, 1.1))
    assert spans["C"]["time"].keys() == {"", "flash"}


def test_a_kind_with_few_residuals_has_the_ranges_of_all() -> None:
    few = [Residual("flash", 9.0, 1.0)] * (LEAST_RESIDUALS - 1)
    many = [Residual("eager", 0.5 + 0.01 * n, 1.0) for n in range(100)]
    assert ranges(few + many).keys() == {"", "eager"}
    assert ranges([*few, few[0], *many])["flash"] == (9.0, 9.0)
    # Five of a hundred lie at or below 0.54, ninety-five at or below 1.44.
    assert ranges(many)["eager"] == pytest.approx((0.54, 1.44))


def test_a_reading_that_a_publisher_decided_does_not_score_it() -> None:
    """Figures of B mean the allocator's count, which was found by looking at them."""
    used = rules(readings=(reading("smi", "b", counter="allocated"),))
    rows = scores(files(FAST), used)
    for row in rows:
        assert row.memory is not None
        allocated = MODEL.predict(row.run.row, FAST).predicted_peak_mem_gib
        if row.run.file == "b":
            assert allocated is not None
            assert row.memory.value > allocated + 0.5
        else:
            assert row.memory.value == allocated


def test_unseen_rows_are_those_of_rules_chosen_without_their_publisher() -> None:
    used = rules(rule("flash", "a1"))
    given = files(FAST)
    given = [
        replace(run, row=replace(run.row, attention="flash")) if run.file in ("a2", "b") else run
        for run in given
    ]
    assert {row.run.file for row in unseen(used, scores(given, used))} == {"a1", "b", "c"}


def test_rows_without_an_answer_say_why() -> None:
    model = replace(
        MODEL,
        predict=lambda row, device: replace(
            MODEL.predict(row, device), predicted_step_time_s=None, predicted_peak_mem_gib=None,
            note="no prediction: no device; assumed: fp32",
        ),
    )  # fmt: skip
    rows = scores(files(FAST), model=model)
    assert {row.reason for row in rows} == {"no prediction: no device"}
    assert {row.time for row in rows} == {None}


@pytest.mark.parametrize(
    ("stage", "gib"), [("first", 3.0), ("middle", 2.0), ("last", 4.0), ("mean", 3.0)]
)
def test_a_figure_of_one_stage_is_compared_with_that_stage(stage: str, gib: float) -> None:
    staged = replace(MODEL, stages=lambda row, device: [(3.0, 9.0), (2.0, 8.0), (4.0, 7.0)])
    used = rules(readings=(reading("smi", stage=stage, counter="allocated"),))
    for row in scores(files(FAST), used, staged):
        assert row.memory is not None
        assert row.memory.value == gib
