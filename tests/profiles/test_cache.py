"""The cache between runs: bounded, replaced whole, and never in the way."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from profiles.cache import MOST_FILES, cache_folder, cache_path, every, has_any, keep, recall
from profiles.record import Document


class Note(Document):
    text: str


def path_of(content: object) -> Path:
    path = cache_path("notes", content)
    assert path is not None
    return path


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
    assert one is not None
    assert one.parent == folder


def test_a_cached_document_is_recalled(folder: Path) -> None:
    path = path_of(1)
    assert recall(path, Note) is None
    keep(path, Note(text="said"))
    assert recall(path, Note) == Note(text="said")


@pytest.mark.parametrize("text", ["", "{", '{"schema_version": 99}', '{"txt": 1}', "\udcff"])
def test_broken_files_and_those_of_another_release_are_ignored(
    folder: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = path_of(1)
    folder.mkdir()
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert recall(path, Note) is None
    assert str(path) in caplog.text


def test_only_the_newest_files_of_a_kind_are_retained(folder: Path) -> None:
    keep(folder / "others-1.json", Note(text="of another kind"))
    paths = [path_of(number) for number in range(MOST_FILES + 3)]
    for age, path in enumerate(reversed(paths)):
        keep(path, Note(text="old"))
        os.utime(path, (1e9 - age, 1e9 - age)) if path.exists() else None
    keep(path_of("newest"), Note(text="new"))
    left = sorted(folder.glob("notes-*.json"))
    assert len(left) == MOST_FILES
    assert path_of("newest") in left
    assert (folder / "others-1.json").exists()


def test_an_unwritable_cache_folder_is_logged_without_an_error(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file is in the way")
    keep(cache_path("notes", 1), Note(text="said"))
    assert "nothing is kept" in caplog.text


def test_files_and_folder_are_for_their_user_alone(folder: Path) -> None:
    keep(path_of(1), Note(text="said"))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path_of(1).stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o666, 0o620, 0o602])
def test_a_file_that_others_may_write_is_not_there(
    folder: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    keep(path_of(1), Note(text="said"))
    path_of(1).chmod(mode)
    assert recall(path_of(1), Note) is None
    assert list(every("notes", Note)) == []
    assert len(caplog.records) == 1
    assert f"others may write it (mode 0{mode:o})" in caplog.text
    keep(path_of(1), Note(text="anew"))
    assert recall(path_of(1), Note) == Note(text="anew")


def test_a_folder_that_others_may_write_is_neither_read_nor_written(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(path_of(1), Note(text="said"))
    folder.chmod(0o777)
    assert recall(path_of(1), Note) is None
    assert not has_any("notes")
    keep(path_of(2), Note(text="more"))
    assert not path_of(2).exists()
    assert len(caplog.records) == 1


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_belongs_to_another_user_is_not_there(
    folder: Path, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keep(path_of(1), Note(text="said"))
    user = os.geteuid()
    if user == 0:
        os.chown(path_of(1) if what == "file" else folder, 4321, -1)
    else:  # whose files cannot be given away
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert recall(path_of(1), Note) is None
    assert "belongs to user" in caplog.text


@pytest.mark.parametrize("kind", ["fifo", "folder", "deep", "huge", "dangling", "locked"])
def test_whatever_lies_in_the_place_of_a_file_is_not_there(
    folder: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir(mode=0o700)
    path = path_of(1)
    match kind:
        case "fifo":
            os.mkfifo(path, 0o600)
        case "folder":
            path.mkdir()
        case "deep":
            path.write_text('{"text":' * 100_000)
        case "huge":
            path.write_text('{"schema_version": ' + "9" * 5000 + "}")
        case "dangling":
            path.symlink_to(folder / "nothing")
        case "locked":
            path.write_text("{}")
            path.chmod(0)
    assert recall(path, Note) is None
    assert list(every("notes", Note)) == []
    assert len(caplog.records) == 1


def test_a_hundred_broken_files_are_one_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir(mode=0o700)
    for number in range(100):
        (folder / f"notes-{number}.json").write_text("{")
    assert list(every("notes", Note)) == []
    assert len(caplog.records) == 1


HOMELESS = """
import os
from profiles.cache import cache_folder, cache_path, every, has_any, keep, recall
from profiles.machine.cluster import ClusterProfile
from profiles.machine.clusters import cluster_from_name
cluster = cluster_from_name("H100-SXM-80GB")
if os.geteuid() == 0:
    os.setuid(54321)
assert cache_folder() is None
path = cache_path("notes", 1)
keep(path, cluster)
assert recall(path, ClusterProfile) is None
assert list(every("notes", ClusterProfile)) == []
assert not has_any("notes")
"""


def test_without_a_home_nothing_is_kept_and_all_works() -> None:
    unset = {"HOME", "XDG_CACHE_HOME"}
    bare = {name: value for name, value in os.environ.items() if name not in unset}
    if os.geteuid():  # this user's home stands in the list of users
        bare["HOME"] = ""
    run = subprocess.run(
        [sys.executable, "-c", HOMELESS], env=bare, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
