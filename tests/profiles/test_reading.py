"""Files as strangers leave them: what is no file, too large or nested without end is refused."""

from __future__ import annotations

import math
import os
import socket
import time
from pathlib import Path

import pytest

from profiles.errors import FileError
from profiles.machine.clusters import load_cluster
from profiles.record import (
    Document,
    Limits,
    Record,
    json_file,
    json_object,
    json_value,
    read_bytes,
    read_text,
    toml_table,
)

DEEP = 100_000  # a hundred times Python's recursion limit


class Numbers(Document):
    numbers: tuple[float, ...] = ()


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for path, kind in [
            (tmp_path / "fifo", "a FIFO"),
            (tmp_path / "socket", "cannot read"),  # the kernel opens none
            (Path("/dev/zero"), "a device"),
            (tmp_path, "Is a directory"),
            (tmp_path / "nu\0l", "no file is named so"),
            (tmp_path / "half \ud800", "no file is named so"),
        ]:
            with pytest.raises(FileError, match=kind):
                read_text(path)


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "five").write_bytes(b"12345")
    assert read_bytes(tmp_path / "five", most=5) == b"12345"
    with pytest.raises(FileError, match="more than 4 bytes"):
        read_bytes(tmp_path / "five", most=4)


def test_a_file_without_an_end_takes_no_more_memory_than_the_limit(tmp_path: Path) -> None:
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(FileError, match="more than 33,554,432 bytes"):
        json_file(tmp_path / "sparse")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[" * DEEP, "nested more than 64 deep"),
        ('{"a":' * DEEP, "nested more than 64 deep"),
        ("[" * 65 + "]" * 65, "nested more than 64 deep"),
        ("[" + "9" * 31 + "]", "1e[+]30 is the most"),
        ("[-1e31]", "1e[+]30 is the most"),
        ("[" + "9" * 5000 + "]", "5,000 digits, 100 are allowed"),
        ("[0." + "1" * 5000 + "]", "5,002 digits"),
        ("[1e999]", "a finite one is wanted"),
        ("[NaN]", "`NaN` is not JSON"),
        ("[-Infinity]", "`-Infinity` is not JSON"),
        ('{"a": 1, "b": 2, "a": 3}', "`a` is given twice"),
        ('["\\ud800"]', "half a character"),
        ('["\\u001b[2J"]', "control character"),
        ('["' + "x" * (2**20 + 1) + '"]', "1,048,577 characters, 1,048,576 are allowed"),
        ("[" + "1," * 1_000_001 + "1]", "1,000,002 values, 1,000,000 are allowed"),
        ('"' + "\\" * DEEP, "not JSON"),
        ('"\\' * DEEP, "not JSON"),
        ("\ufeff{}", "not JSON"),
        ("", "not JSON"),
    ],
    ids=lambda text: repr(text[:12]),
)
def test_json_beyond_the_limits_is_refused_within_a_second(text: str, complaint: str) -> None:
    start = time.perf_counter()
    with pytest.raises(FileError, match=complaint) as caught:
        json_value(text, where="given.json")
    assert "given.json" in str(caught.value)
    assert len(str(caught.value)) < 300
    assert time.perf_counter() - start < 1


def test_brackets_inside_texts_are_not_nesting() -> None:
    text = "[[{{\\" * 100
    assert json_value(Document.to_json(Numbers()))["schema_version"] == 1
    assert json_object('{"a": "' + "[" * 100 + '\\""}') == {"a": "[" * 100 + '"'}
    assert json_value(f'["{text.encode("unicode_escape").decode()}"]') == [text]


def test_what_lies_within_the_limits_is_read_exactly() -> None:
    assert json_value("[" * 64 + "]" * 64)
    assert json_value("9" * 30) == 10**30 - 1
    assert json_value("9" * 100, limits=Limits(magnitude=math.inf)) == 10**100 - 1
    assert json_value('["\\u00e9\\n\\t", -1.5e-300, true, null]') == [
        "é\n\t",
        -1.5e-300,
        True,
        None,
    ]
    tight = Limits(values=1, depth=1, digits=1, characters=1, has_controls=True)
    assert json_value('["\\u001b"]', limits=tight) == ["\x1b"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a = " + "[" * DEEP, "nested more than 64 deep"),
        ("a = " + "{a=" * 5000, "nested more than 64 deep"),
        (".".join("a" * 100_000) + " = 1", "a key of more than 16 parts"),
        ("[" + ".".join(['"a"'] * 17) + "]", "a key of more than 16 parts"),
        ("a = " + "9" * 5000, "5000 characters, 128 are allowed"),
        ("a = 0x" + "f" * 5000, "5002 characters"),
        ("a = 1e31", "1e[+]30 is the most"),
        ("a = 1e999", "a finite one is wanted"),
        ("a = nan", "a finite one is wanted"),
        ('a = "\\u001b"', "control character"),
        ("a = 1\na = 2", "not TOML"),
        ("#" * 300_000, "300,000 characters, 262,144 are allowed"),
        ("a = '" + '"' * 100_000, "not TOML"),
        ('a = """' + '"\\' * 100_000, "not TOML"),
    ],
    ids=lambda text: repr(text[:12]),
)
def test_toml_beyond_the_limits_is_refused_within_a_second(text: str, complaint: str) -> None:
    start = time.perf_counter()
    with pytest.raises(FileError, match=complaint) as caught:
        toml_table(text, where="given.toml")
    assert "given.toml" in str(caught.value)
    assert len(str(caught.value)) < 300
    assert time.perf_counter() - start < 1


def test_dots_and_brackets_in_comments_and_texts_of_toml_do_not_count() -> None:
    dots = "." * 100 + "[" * 100 + "9" * 200
    text = (
        f'# {dots}\na = \'{dots}\' # {dots}\nb = "\\"{dots}"\n'
        f'c = \'\'\'\n\'{dots}\'\'\'\'\nd = """\n\\""{dots}""""\nf.g = [1.5, 2.5]\n'
    )
    quoted = {"a": dots, "b": f'"{dots}', "c": f"'{dots}'", "d": f'""{dots}"'}
    assert toml_table(text) == {**quoted, "f": {"g": [1.5, 2.5]}}


def test_a_document_of_wrong_values_alone_is_refused_without_a_list_of_them() -> None:
    with pytest.raises(FileError.__base__, match="300,000 of its values cannot be used"):
        Numbers.from_object({"numbers": ["x"] * 300_000}, where="given.json")


def test_a_long_value_is_shown_in_part() -> None:
    class Named(Record):
        count: int

    with pytest.raises(ValueError, match="count") as caught:
        Named.build({"count": "x" * 100_000})
    assert len(str(caught.value)) < 300


def test_a_cluster_file_that_is_a_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "cluster.toml")
    with pytest.raises(FileError, match="a FIFO"):
        load_cluster(tmp_path / "cluster.toml")
