"""Runs that are kept: found again on the same kind of machine only, and never in the way."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from profiles.cache import MOST_FILES
from profiles.machine.cluster import Constant
from profiles.provenance import Timing
from profiles.timing.runs import ConstantShare, Machine, TrainingRun, keep_run, runs_on

HERE = Machine(
    device="cpu", processor="one of ours", threads=1, ranks_per_node=2, torch="2.13", ours="1"
)


def run(number: int = 0, machine: Machine = HERE) -> TrainingRun:
    return TrainingRun(
        machine=machine,
        model="gpt",
        fingerprint=str(number),
        plan="dp_replicate=2",
        dtype="float32",
        predicted_s=1.0,
        parts={Constant.PRODUCTS: ConstantShare(seconds=0.75, unit_s=1e-12)},
        step=Timing(median_s=1.5, low_s=1.4, high_s=1.6, repeats=20),
        ended_at=f"2026-01-01T00:{number:02}:00+00:00",
    )


def test_saved_runs_are_read_oldest_first(tmp_path: Path) -> None:
    for number in (2, 0, 1):
        keep_run(run(number), folder=tmp_path)
    assert runs_on(HERE, folder=tmp_path) == (run(0), run(1), run(2))


@pytest.mark.parametrize(
    "other",
    [
        {"device": "H100"},
        {"processor": "another"},
        {"threads": 2},
        {"ranks_per_node": 4},
        {"torch": "2.14"},
        {"ours": "2"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_runs_of_other_machines_are_not_taken(tmp_path: Path, other: dict[str, object]) -> None:
    keep_run(run(machine=HERE.model_copy(update=other)), folder=tmp_path)
    assert runs_on(HERE, folder=tmp_path) == ()


@pytest.mark.parametrize(
    "text", ["", "{", '{"schema_version": 99}', '{"nothing of ours": 1}', "\udcff"]
)
def test_a_broken_file_is_noted_and_the_others_are_read(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    keep_run(run(), folder=tmp_path)
    broken = tmp_path / "runs-broken.json"
    broken.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert runs_on(HERE, folder=tmp_path) == (run(),)
    assert f"{broken} is not used" in caplog.text


def test_equal_runs_of_concurrent_writers_are_all_saved(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: keep_run(run(), folder=tmp_path), range(24)))
    assert runs_on(HERE, folder=tmp_path) == (run(),) * 24


def test_the_number_of_saved_runs_is_bounded(tmp_path: Path) -> None:
    for number in range(MOST_FILES + 5):
        keep_run(run(number % 60), folder=tmp_path)
    assert len(runs_on(HERE, folder=tmp_path)) == MOST_FILES


def test_a_missing_folder_has_no_runs_and_an_unwritable_one_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "none"
    assert runs_on(HERE, folder=folder) == ()
    folder.write_text("a file is in the way")
    keep_run(run(), folder=folder)
    assert "nothing is kept" in caplog.text
