"""The published figures are what the code gives, each computed again from the runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.scorecard import __main__ as command
from tests.scorecard import table
from tests.scorecard.__main__ import RESULT, constants_of, result, values
from tests.scorecard.calibrate import fit, settings
from tests.scorecard.left_out import names_without, ranges_of, reading_without, scored
from tests.scorecard.model import MODEL
from tests.scorecard.published import FOLDER, Published, published
from tests.scorecard.rules import load
from tests.scorecard.score import card

SAVED: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
SAMPLE = MODEL.remembering()


@cache
def runs() -> list[Published]:
    """Of the files that the card is of."""
    actual = published(FOLDER, SAVED["files"])
    if absent := sorted(set(SAVED["files"]) - {run.file for run in actual}):
        pytest.skip(f"not at {FOLDER}: {', '.join(absent)}")
    return actual


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every figure, by the keys that lead to it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{name} / {key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{name} / {index}")
    else:
        yield name, value


def test_every_figure_with_the_constants_as_they_are_is_what_the_code_gives() -> None:
    """Every row, from the code that also predicts it with constants fitted without a publisher."""
    again = card(scored(SAMPLE, load(), runs(), SAMPLE.calibration))
    assert_published(again, SAVED["as they are"])


@pytest.mark.slow
@pytest.mark.nightly
def test_every_published_figure_is_what_the_code_gives() -> None:
    again = result(SAMPLE, load(), runs(), SAVED["without"], SAVED["ranges without"])
    assert_published(again, SAVED)


def assert_published(again: dict[str, Any], published_figures: dict[str, Any]) -> None:
    actual, saved = dict(leaves(again)), dict(leaves(published_figures))
    assert actual.keys() == saved.keys(), "run `make scorecard`"
    for name, value in saved.items():
        # Figures are published with four digits after the point.
        exact = isinstance(value, str | None | bool)
        expected = value if exact else pytest.approx(value, abs=1.01e-4, rel=1e-9)
        assert actual[name] == expected, f"{name}: run `make scorecard`"


@pytest.mark.slow
def test_saved_fits_without_publishers_are_reproduced() -> None:
    """Of the publishers that leave the least to fit to."""
    rules, given = load(), runs()
    pairs = names_without(rules, given)
    assert SAVED["without"].keys() == pairs.keys(), "run `make scorecard`"
    left = {
        key: [run for run in given if rules.publisher(run.file) not in names]
        for key, names in pairs.items()
    }
    key = min(left, key=lambda one: len(settings(left[one])))
    fitted = fit(SAMPLE, left[key], rules.priors(), reading_without(rules, pairs[key]))
    assert values(fitted, rules) == pytest.approx(SAVED["without"][key], rel=1e-4)


@pytest.mark.slow
def test_the_ranges_that_score_a_publisher_are_from_the_others() -> None:
    rules, given = load(), runs()
    constants = constants_of(SAMPLE, SAVED["without"])
    for name in ("", min(name for name in SAVED["ranges without"] if name)):
        actual = dict(leaves(ranges_of(SAMPLE, rules, given, constants, name)))
        assert actual == pytest.approx(dict(leaves(SAVED["ranges without"][name])), rel=1e-3)


def test_every_file_of_runs_is_scored() -> None:
    if not FOLDER.is_dir():
        pytest.skip(f"no published runs at {FOLDER}")
    nested = json.loads(table.NESTED.read_text()) if table.NESTED.is_file() else {"files": {}}
    there = {path.stem for path in FOLDER.glob("*.csv")}
    assert there <= SAVED["files"].keys() | nested["files"].keys(), "run `make scorecard`"


def test_the_readme_shows_the_saved_scorecard() -> None:
    assert table.text(SAVED) in table.README.read_text(encoding="utf-8")


def test_missing_runs_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    assert command.main([]) == 2
    said = capsys.readouterr().err
    assert str(tmp_path) in said
    assert "measured_step_time_s" in said
