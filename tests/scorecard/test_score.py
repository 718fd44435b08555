"""Figures of merit are those of hand-computed rows."""

from __future__ import annotations

import pytest

from advisor.predict.rows import TableRow
from tests.scorecard.published import Published
from tests.scorecard.score import Interval, Scored, card, choice, errors, failures, marks


def row(name: str, true: float | None, predicted: float, *, tp: int = 1, oom: bool | None = None,
        fits: bool = True, kind: str = "eager", reliability: str = "high") -> Scored:  # fmt: skip
    """Of `true` seconds and GiB; the range is a fifth to either side."""
    run = Published(
        file="f", row=TableRow(row_id=name, source="s", tp=tp), reliability=reliability,
        step_s=true,
        memory_gib=true, memory_metric="", oom=oom, samples_per_s=None,
    )  # fmt: skip
    interval = Interval(predicted, 0.8 * predicted, 1.2 * predicted)
    return Scored(run, kind, kind, interval, interval, fits)


@pytest.mark.parametrize("part", ["time", "memory"])
def test_errors_are_those_of_hand_computed_rows(part: str) -> None:
    summary = errors([row("a", 1.0, 1.1), row("b", 1.0, 0.7), row("c", 2.0, 2.0)], part)
    assert summary is not None
    assert summary.rows == 3
    assert summary.median == pytest.approx(0.1)
    assert summary.worst == pytest.approx(0.3)
    assert summary.worst_row == "b"
    # 0.7 * 1.2 is 0.84: the second run took more than its range admits.
    assert summary.covered == pytest.approx(2 / 3)
    assert summary.beyond == pytest.approx(1 / 3)


def test_nine_of_ten_errors_are_at_most_the_p90() -> None:
    summary = errors([row(f"{n}", 1.0, 1 + n / 100) for n in range(1, 11)], "time")
    assert summary is not None
    assert summary.p90 == pytest.approx(0.10)


def test_the_peak_of_a_run_that_failed_is_not_compared() -> None:
    assert errors([row("a", 1.0, 1.1, oom=True)], "memory") is None


def test_regret_is_what_the_layout_predicted_as_best_takes_longer() -> None:
    chosen = choice([row("a", 1.0, 1.2, tp=1), row("b", 1.1, 1.0, tp=2), row("c", 2.0, 2.0, tp=4)])
    assert chosen is not None
    assert chosen.regret == pytest.approx(0.1)
    # Ranks 2 1 3 against 1 2 3: 1 - 6 * 2 / (3 * 8).
    assert chosen.correlation == pytest.approx(0.5)
    assert choice([row("a", 1.0, 1.2, tp=1), row("b", 1.1, 1.0, tp=2)]) is None


def test_failures_count_correct_predictions_of_oom() -> None:
    counts = failures(
        [
            row("a", None, 1.0, oom=True, fits=False),
            row("b", None, 1.0, oom=True, fits=True),
            row("c", 1.0, 1.0, oom=False, fits=False),
            row("d", 1.0, 1.0, oom=False, fits=False),
            row("e", 1.0, 1.0, oom=False, fits=True),
            row("f", 1.0, 1.0, fits=False),
        ]
    )
    assert counts is not None
    assert (counts.rows, counts.failed) == (5, 2)
    assert counts.recall == pytest.approx(1 / 2)
    assert counts.precision == pytest.approx(1 / 3)


def test_a_card_splits_by_stack_and_reliability_and_counts_rows_without_an_answer() -> None:
    silent = Scored(row("x", 1.0, 1.0).run, "none", "none", reason="no prediction: no device")
    rows = [
        row("a", 1.0, 1.1),
        row("b", 1.0, 1.5, kind="flash"),
        row("c", 1.0, 1.3, reliability="medium"),
        row("d", 1.0, 9.0, reliability="low"),
        silent,
    ]
    scores = card(rows)
    assert scores["all"]["rows"] == 5
    assert scores["all"]["high"]["time"]["rows"] == 2
    assert scores["all"]["medium too"]["time"]["rows"] == 3
    assert scores["all"]["medium too"]["time"]["median"] == 0.3
    assert scores["kinds of stack"]["flash"]["high"]["time"]["covered"] == 0.0
    assert scores["kinds of stack"]["eager"]["high"]["time"]["covered"] == 1.0
    assert scores["no answer"] == {"no prediction: no device": 1}


def test_marks_show_which_targets_are_met() -> None:
    lines = marks(card([row("a", 1.0, 1.07)])["all"])
    assert "time median 0.070 <= 0.08: met" in lines
    assert "memory median 0.070 <= 0.05: missed" in lines
    assert "choice regret: no rows" in lines
