"""The lint of wording finds each kind of offence in files written for it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

check_folders = runpy.run_path(str(Path(__file__).parents[1] / ".ci" / "words.py"))["check_folders"]

OFFENCES = {
    'def size() -> int:\n    """How many bytes."""\n': (
        "library/file.py:2: docstring begins with a question word: How many bytes."
    ),
    '"""Whether it fits."""\n': (
        "library/file.py:1: docstring begins with a question word: Whether it fits."
    ),
    "x = 1\nfound = 2\n": (
        "library/file.py:2: `found` says nothing: name the thing that was found"
    ),
    "def first(found: int) -> int:\n    return found\n": (
        "library/file.py:1: `found` says nothing: name the thing that was found"
    ),
    "class HeldMemory: ...\n": "library/file.py:1: `HeldMemory` is retired: say PeakMemory",
    "class Cell:\n    back_bytes: int\n": (
        "library/file.py:2: `back_bytes` is retired: say gradient_bytes"
    ),
    "class Run: ...\n\n\nclass Run: ...\n": (
        "library/file.py:4: class Run is also at library/file.py:1"
    ),
}

CLEAN = '''"""Bytes that a unit allocates."""


class Unit:
    """However: a word that only begins like a question is none."""

    def find(self) -> str:
        """Return `found`, as a string: it names nothing."""
        return "found"


class _Private: ...


class _Private: ...
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("library").mkdir()
    return Path("library")


@pytest.mark.parametrize(("source", "message"), OFFENCES.items())
def test_offence_is_reported_with_its_line(library: Path, source: str, message: str) -> None:
    (library / "file.py").write_text(source)
    assert check_folders([library]) == [message]


def test_retired_module_name(library: Path) -> None:
    (library / "ways_out.py").write_text("")
    assert check_folders([library]) == ["library/ways_out.py:1: module `ways_out`: say infeasible"]


def test_class_of_two_folders(library: Path) -> None:
    Path("engine").mkdir()
    for folder in ("engine", "library"):
        Path(folder, "run.py").write_text("class Run: ...\n")
    assert check_folders([Path("engine"), library]) == [
        "library/run.py:1: class Run is also at engine/run.py:1"
    ]


def test_clean_file(library: Path) -> None:
    (library / "file.py").write_text(CLEAN)
    assert check_folders([library]) == []
