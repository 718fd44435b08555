"""The kept scorecard is of the constants that are in use, and its figures are what they say."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from advisor.predict.constants import CONSTANTS
from advisor.predict.memory_constants import FITTED
from advisor.predict.prediction import Prediction
from advisor.predict.rows import Row
from advisor.predict.time import step_time
from tests.scorecard.__main__ import left_out_predictions
from tests.scorecard.fit import fit, loss, timed_runs
from tests.scorecard.published import FOLDER, Published, published
from tests.scorecard.score import choice, failures, time_errors
from tests.scorecard.table import README, table

KEPT = Path(__file__).with_name("scorecard.json")


def run(name: str, seconds: float | None, *, tp: int = 1, oom: bool | None = None) -> Published:
    row = Row(row_id=name, source="s", tp=tp)
    return Published(
        file="f", row=row, reliability="high", step_s=seconds, memory_gib=None,
        memory_metric="", oom=oom, samples_per_s=None,
    )  # fmt: skip


def told(name: str, seconds: float, *, fits: bool = True) -> Prediction:
    return Prediction(
        row_id=name, predicted_step_time_s=seconds, time_low_s=0.8 * seconds,
        time_high_s=1.2 * seconds, predicted_fits=fits,
    )  # fmt: skip


def test_errors_are_those_of_hand_computed_pairs() -> None:
    pairs = [
        (run("a", 1.0), told("a", 1.1)),
        (run("b", 1.0), told("b", 0.7)),
        (run("c", 2.0), told("c", 2.0)),
    ]
    errors = time_errors(pairs)
    assert errors is not None
    assert errors.median == pytest.approx(0.1)
    assert errors.worst == pytest.approx(0.3)
    assert errors.worst_row == "b"
    # 0.7 * 1.2 is 0.84: the second run took longer than its range admits.
    assert errors.covered == pytest.approx(2 / 3)
    assert errors.beyond == pytest.approx(1 / 3)


def test_regret_is_what_the_layout_predicted_as_best_takes_longer() -> None:
    pairs = [
        (run("a", 1.0, tp=1), told("a", 1.2)),
        (run("b", 1.1, tp=2), told("b", 1.0)),
        (run("c", 2.0, tp=4), told("c", 2.0)),
    ]
    chosen = choice(pairs)
    assert chosen is not None
    assert chosen.regret == pytest.approx(0.1)
    # Ranks 2 1 3 against 1 2 3: 1 - 6 * 2 / (3 * 8).
    assert chosen.correlation == pytest.approx(0.5)


def test_failures_count_what_was_foretold() -> None:
    pairs = [
        (run("a", None, oom=True), told("a", 1.0, fits=False)),
        (run("b", None, oom=True), told("b", 1.0, fits=True)),
        (run("c", 1.0, oom=False), told("c", 1.0, fits=False)),
        (run("d", 1.0, oom=False), told("d", 1.0, fits=True)),
    ]
    found = failures(pairs)
    assert (found.recall, found.precision) == (0.5, 0.5)


def test_the_kept_scorecard_is_of_the_constants_in_use() -> None:
    kept = json.loads(KEPT.read_text())
    for name, value in asdict(CONSTANTS).items():
        assert kept["values"][name] == pytest.approx(value, rel=1e-3), "run `make scorecard`"


def test_the_kept_scorecard_is_of_the_memory_constants_in_use() -> None:
    kept = json.loads(KEPT.read_text())
    for name, value in asdict(FITTED).items():
        assert kept["values"][name] == pytest.approx(value, rel=1e-3), "run `make scorecard`"


def test_the_readme_shows_the_kept_scorecard() -> None:
    kept = json.loads(KEPT.read_text())
    assert table(kept) in README.read_text()


def test_memory_of_sources_left_out_keeps_its_marks() -> None:
    kept = json.loads(KEPT.read_text())["left out"]["all"]
    memory = kept["memory"]
    assert memory["rows"] > 400
    assert memory["median"] <= 0.08
    assert memory["p90"] <= 0.20
    assert memory["beyond"] <= 0.05
    assert 0.85 <= memory["covered"] <= 0.95
    # Every run of high reliability that failed was told. Of the others three were not: two of
    # AMP's, which are called failed for whatever reason, and one of BigScience's, a sibling of a
    # run that ended with 67 of 80 GB.
    assert kept["failures"]["recall"] >= 0.95
    assert kept["failures, medium too"]["recall"] >= 0.88
    assert kept["failures, medium too"]["precision"] >= 0.9


def test_nine_of_ten_times_of_sources_left_out_lie_in_their_ranges() -> None:
    if not FOLDER.is_dir():
        pytest.skip(f"no published runs at {FOLDER}")
    kept = json.loads(KEPT.read_text())
    pairs = left_out_predictions(published(), kept["without"])
    errors = time_errors(pair for pair in pairs if pair[0].reliability == "high")
    assert errors is not None
    assert 0.85 <= errors.covered <= 0.95
    # What the kept scorecard says is what its constants give.
    assert errors.median == pytest.approx(kept["left out"]["all"]["time"]["median"], abs=1e-3)


def test_a_fit_finds_the_constant_that_runs_were_made_with() -> None:
    if not FOLDER.is_dir():
        pytest.skip(f"no published runs at {FOLDER}")
    runs = [one for one in timed_runs(published()) if one.run.file == "megatron_a100_scaling"]
    truth = replace(CONSTANTS, sustained=0.8 * CONSTANTS.sustained)
    made = [replace(one, step_s=step_time(one.basis, truth).step_s) for one in runs]
    found = fit(made, rounds=12)
    assert found.sustained == pytest.approx(truth.sustained, rel=0.05)
    assert loss(found, made) < 0.01 < loss(CONSTANTS, made)
