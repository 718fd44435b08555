"""Files as strangers leave them: what is no file, too large or nested without end is refused."""

from __future__ import annotations

import json
import math
import os
import socket
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profiles.errors import FileError, InputError
from profiles.machine.clusters import load_cluster
from profiles.model.profile import ModelProfile
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
from tests.factories import small_llama

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


def object_of(keys: int, first: int = 0) -> str:
    return "{" + ",".join(f'"k{number}":{number}' for number in range(first, first + keys)) + "}"


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
        ("[" + "1," * 500_001 + "1]", "500,002 values, 500,000 are allowed"),
        (object_of(200_001), "200,001 keys in one object, 200,000 are allowed"),
        ('"' + "\\" * DEEP, "not JSON"),
        ('"\\' * DEEP, "not JSON"),
        ("\ufeff{}", "not JSON"),
        ("", "not JSON"),
    ],
    ids=lambda text: repr(text[:12]),
)
def test_json_beyond_the_limits_is_refused_within_a_second_of_the_processor(
    text: str, complaint: str
) -> None:
    start = time.process_time()
    with pytest.raises(FileError, match=complaint) as caught:
        json_value(text, where="given.json")
    assert "given.json" in str(caught.value)
    assert len(str(caught.value)) < 300
    assert time.process_time() - start < 1


@pytest.mark.timed
@pytest.mark.parametrize(
    "value",
    [
        lambda: ",".join(object_of(160_000, first) for first in range(0, 480_000, 160_000)),
        lambda: ",".join('"\\u0041\\n"' for _ in range(499_000)),
        lambda: ",".join('{"a":1,"b":"x"}' for _ in range(166_000)),
        lambda: ",".join("[" * 62 + "]" * 62 for _ in range(7_900)),
        lambda: ",".join("1.5e10" for _ in range(499_000)),
    ],
    ids=["keys", "escapes", "small objects", "nesting", "floats"],
)
def test_the_largest_json_that_is_allowed_is_read_within_a_second(
    value: Callable[[], str],
) -> None:
    text = f'{{"a":[{value()}]}}'
    start = time.process_time()
    read = json_value(text)
    assert time.process_time() - start < 1
    assert read == json.loads(text)


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
    for wrong in (["x"] * 300_000, {"x": 1}):
        with pytest.raises(InputError) as caught:
            Numbers.from_object({"numbers": wrong}, where="given.json")
        assert len(str(caught.value)) < 300
    with pytest.raises(InputError, match="150,000 of its values cannot be used"):
        Numbers.from_object({str(number): 1 for number in range(150_000)})
    # A description of each of so many mistakes would take 150 MB.
    tracemalloc.start()
    with pytest.raises(InputError, match=r"`numbers\.0` = 'x'"):
        Numbers.from_object({"numbers": ["x"] * 300_000})
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 20e6


def test_a_profile_of_450_layers_in_all_numerics_is_saved_and_read(tmp_path: Path) -> None:
    profile = small_llama(layers=450)
    profile.save(tmp_path / "model.json")
    assert ModelProfile.load(tmp_path / "model.json") == profile


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda data: data["units"][1]["costs"].clear(), "wants `costs` of the same numerics"),
        (lambda data: data["units"][1]["costs"].pop("bf16"), "the same numerics as every unit"),
        (lambda data: data["flow"]["edges"][0].update(target=99), "taken by call 99"),
        (lambda data: data["flow"]["edges"][0].update(value=9), "value 9 of call 0"),
        (lambda data: data.update(units=data["units"][:1] * 40_001), "at most 40000 items"),
    ],
)
def test_a_profile_that_contradicts_itself_is_refused(
    change: Callable[[dict[str, Any]], object], complaint: str
) -> None:
    data = json.loads(small_llama(layers=2).to_json())
    change(data)
    with pytest.raises(InputError, match=complaint):
        ModelProfile.from_object(data)


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
