"""Hundreds of hostile files for every reader; `make fuzz` tries hundreds of times as many."""

from __future__ import annotations

import json
import os
import socket
from contextlib import nullcontext, suppress
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from profiles.errors import FileError, InputError
from profiles.record import json_value, toml_table
from tests.fuzz.mutations import mutated
from tests.fuzz.readers import Reader, readers
from tests.fuzz.runner import fuzzed, outcome_of
from tests.nightly import nightly

READERS = {reader.name: reader for reader in readers()}
CASES = 1000
OFTEN = 0.4
SLOW = {
    "table": 150,
    "config": 300,
    "config-built": 20,
    "decision": 150,
    "anchor": 500,
} | dict.fromkeys(("checkpoint", "checkpoint-forged"), 300)
"""Fewer of those that take more than some milliseconds, so that all take less than a minute."""
OF_FILES = [name for name in READERS if name not in ("options", "quantities", "plan-text")]


@pytest.mark.parametrize("share", [OFTEN, *nightly(1.0)])
@pytest.mark.parametrize("name", READERS)
def test_a_reader_reads_or_refuses(name: str, share: float, tmp_path: Path) -> None:
    """The first cases of a seed are the same for any number of them."""
    cases = int(share * SLOW.get(name, CASES))
    result = fuzzed(READERS[name], cases=cases, seed=1, folder=tmp_path)
    assert result.findings == {}
    assert result.accepted + result.refused == result.cases


@pytest.mark.parametrize("name", READERS)
def test_real_files_are_read(name: str, tmp_path: Path) -> None:
    """Else all cases would be refused at the first line."""
    reader = READERS[name]
    for content in reader.seeds():
        path = tmp_path / reader.file
        path.write_bytes(content)
        path.chmod(0o600)
        with suppress(InputError) if name == "options" else nullcontext():
            assert reader.read(path) is None


def in_its_place(path: Path, kind: str) -> None:
    match kind:
        case "FIFO":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "circle of links":
            path.symlink_to(path.name)
        case "device":
            path.symlink_to("/dev/zero")
        case "socket":
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(str(path))
        case "a terabyte":
            with open(path, "wb") as file:
                file.truncate(2**40)


@pytest.mark.parametrize(
    "kind", ["nothing", "FIFO", "folder", "circle of links", "device", "socket", "a terabyte"]
)
@pytest.mark.parametrize(
    "name", [n for n in OF_FILES if not n.startswith(("checkpoint", "cluster-name"))]
)
def test_what_is_no_file_is_refused_at_once(name: str, kind: str, tmp_path: Path) -> None:
    reader = READERS[name]
    path = tmp_path / reader.file
    in_its_place(path, kind)
    expected = "accepted" if name == "cache" else "refused"
    assert outcome_of(reader, path)[0] == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=20,
)


def _largest(value: object) -> float:
    match value:
        case int() | float():
            return abs(value)
        case list():
            return max(map(_largest, value), default=0)
        case dict():
            return max(map(_largest, value.values()), default=0)
    return 0


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(value=JSON)
def test_what_is_written_is_read_back_or_refused(value: object) -> None:
    text = json.dumps(value)
    escapes = ("\\u", "\\r", "\\b", "\\f", "\\n", "\\t")  # of controls and halves of characters
    is_odd = (
        any(what in text for what in ("NaN", "Infinity", "\x7f", *escapes))
        or _largest(value) > 1e30
    )
    with nullcontext() if not is_odd else suppress(FileError):
        assert json_value(text) == value


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=st.text() | st.text('[]{}":,0123456789.eE+-\\ tfn"\'=\n#_x', max_size=60))
def test_any_text_is_json_and_toml_or_refused(text: str) -> None:
    for parse in (json_value, toml_table):
        with suppress(FileError):
            parse(text)


def test_the_same_seed_makes_the_same_cases() -> None:
    content = b'{"a": [1, 2.5, "x"], "b": null}'
    cases = [mutated(content, Random(number)) for number in range(200)]
    assert cases == [mutated(content, Random(number)) for number in range(200)]
    assert len(set(cases)) > 150


def test_a_reader_that_fails_is_found(tmp_path: Path) -> None:
    """The fuzzer's own test: a traceback, a slow case and a wrong result are told apart."""

    def broken(path: Path) -> object:
        content = path.read_bytes()
        if content.startswith(b"{"):
            return "other numbers" if b"1" in content else None
        raise KeyError("x")

    reader = Reader("broken", "x.json", broken, lambda: [b'{"a": 1}'])
    findings = fuzzed(reader, cases=300, seed=0, folder=tmp_path).findings
    assert any(finding.startswith("KeyError at tests/fuzz/test_fuzz.py") for finding in findings)
    assert findings["wrong: other numbers"] > 0
