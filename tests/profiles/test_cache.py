"""The cache between runs: bounded, replaced whole, and never in the way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from profiles.cache import MOST_FILES, cache_folder, cache_path, keep, recall
from profiles.record import Document


class Note(Document):
    text: str


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "parallel-advisor"


def test_the_folder_is_xdgs_or_under_home(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    assert cache_folder() == folder
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(folder))
    assert cache_folder() == folder / ".cache" / "parallel-advisor"


def test_the_same_content_has_the_same_place_and_other_content_another(folder: Path) -> None:
    one = cache_path("notes", {"a": 1, "b": [2]}, "cpu")
    assert one == cache_path("notes", {"b": [2], "a": 1}, "cpu")
    assert one != cache_path("notes", {"a": 1, "b": [2]}, "gpu")
    assert one.parent == folder


def test_a_cached_document_is_recalled(folder: Path) -> None:
    path = cache_path("notes", 1)
    assert recall(path, Note) is None
    keep(path, Note(text="said"))
    assert recall(path, Note) == Note(text="said")


@pytest.mark.parametrize("text", ["", "{", '{"schema_version": 99}', '{"txt": 1}', "\udcff"])
def test_broken_files_and_those_of_another_release_are_ignored(
    folder: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = cache_path("notes", 1)
    folder.mkdir()
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert recall(path, Note) is None
    assert str(path) in caplog.text


def test_only_the_newest_files_of_a_kind_are_retained(folder: Path) -> None:
    keep(folder / "others-1.json", Note(text="of another kind"))
    paths = [cache_path("notes", number) for number in range(MOST_FILES + 3)]
    for age, path in enumerate(reversed(paths)):
        keep(path, Note(text="old"))
        os.utime(path, (1e9 - age, 1e9 - age)) if path.exists() else None
    keep(cache_path("notes", "newest"), Note(text="new"))
    left = sorted(folder.glob("notes-*.json"))
    assert len(left) == MOST_FILES
    assert cache_path("notes", "newest") in left
    assert (folder / "others-1.json").exists()


def test_an_unwritable_cache_folder_is_logged_without_an_error(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file is in the way")
    keep(cache_path("notes", 1), Note(text="said"))
    assert "nothing is kept" in caplog.text
