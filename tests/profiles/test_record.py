"""Records that cross a file: exact round trips, friendly mistakes, writes that lose nothing."""

from __future__ import annotations

import errno
import json
import os
from functools import cached_property
from pathlib import Path

import pytest

from profiles.errors import FileError, InputError, UnknownNameError
from profiles.machine.cluster import ClusterProfile
from profiles.machine.clusters import cluster_from_name
from profiles.record import Record, read_text, require_writable, write_text


@pytest.fixture
def cluster() -> ClusterProfile:
    return cluster_from_name("2x8xH100-SXM-80GB")


def test_a_document_survives_its_file(cluster: ClusterProfile, tmp_path: Path) -> None:
    cluster.save(tmp_path / "cluster.json")
    assert ClusterProfile.load(tmp_path / "cluster.json") == cluster


def test_equal_documents_are_equal_bytes(cluster: ClusterProfile) -> None:
    again = ClusterProfile.from_json(cluster.to_json())
    assert again.to_json() == cluster.to_json()


def test_a_misspelt_key_names_the_near_miss(cluster: ClusterProfile) -> None:
    data = json.loads(cluster.to_json())
    data["device"]["memory_byte"] = data["device"].pop("memory_bytes")
    with pytest.raises(UnknownNameError) as caught:
        ClusterProfile.build(data | {"device": data["device"]}, where="c.json")
    assert "unknown key `memory_byte`" in str(caught.value)
    assert "c.json: device.memory_byte" in str(caught.value)
    assert "did you mean `memory_bytes`" in str(caught.value)


def test_a_missing_key_and_a_wrong_type_are_named(cluster: ClusterProfile) -> None:
    data = json.loads(cluster.to_json())
    without = {key: value for key, value in data.items() if key != "num_nodes"}
    with pytest.raises(InputError, match="`num_nodes` is missing"):
        ClusterProfile.build(without, where="c.json")
    with pytest.raises(InputError, match=r"`num_nodes` = 'two'"):
        ClusterProfile.build(data | {"num_nodes": "two"})


def test_of_several_mistakes_the_first_is_named(cluster: ClusterProfile) -> None:
    data = json.loads(cluster.to_json()) | {"shared_cores": "two", "num_nodes": "two"}
    with pytest.raises(InputError, match=r"`num_nodes` = 'two'"):
        ClusterProfile.build(data)


def test_another_schema_version_is_refused(cluster: ClusterProfile) -> None:
    newer = cluster.to_json().replace('"schema_version": 1', '"schema_version": 99')
    with pytest.raises(FileError, match="schema version 99"):
        ClusterProfile.from_json(newer)


@pytest.mark.parametrize(
    ("text", "complaint"), [("{", "not JSON"), ("[1]", "a JSON object is wanted, this is a list")]
)
def test_a_broken_file_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(FileError, match=complaint):
        ClusterProfile.from_json(text, where="c.json")


def test_not_a_number_is_refused(cluster: ClusterProfile) -> None:
    text = cluster.to_json().replace('"relative_error": 0.31', '"relative_error": NaN')
    assert "NaN" in text
    with pytest.raises(InputError, match="finite"):
        ClusterProfile.from_json(text)


def test_unreadable_files_say_why(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileError, match="No such file"):
        read_text(tmp_path / "absent")
    with pytest.raises(FileError, match="Is a directory"):
        read_text(tmp_path)
    with pytest.raises(FileError, match="not UTF-8"):
        read_text(tmp_path / "binary")


@pytest.mark.parametrize(
    ("call", "code"),
    [("fsync", errno.ENOSPC), ("replace", errno.EACCES), ("fsync", errno.EDQUOT)],
)
def test_a_refused_write_leaves_the_old_file(
    call: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "plan.json"
    write_text(target, "old")

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(FileError) as caught:
        write_text(target, "new")
    assert str(caught.value).startswith(f"cannot write `{target}`: {os.strerror(code)}")
    assert "the old file is as it was" in str(caught.value)
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_folder_that_takes_no_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileError, match="No such file or directory"):
        write_text(tmp_path / "absent" / "plan.json", "new")

    def refuse(**_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("profiles.record.writing.tempfile.mkstemp", refuse)
    with pytest.raises(FileError, match="Permission denied"):
        write_text(tmp_path / "plan.json", "new")


def test_require_writable_refuses_what_a_write_would(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="No such file or directory"):
        require_writable(tmp_path / "absent" / "plan.json")
    with pytest.raises(FileError, match="Is a directory"):
        require_writable(tmp_path)
    require_writable(tmp_path / "plan.json")
    assert list(tmp_path.iterdir()) == []


def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    """Else root's `-o /dev/null` would leave the machine a file in the place of its device."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "device").symlink_to("/dev/null")
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    for name, said in [
        ("fifo", "it is a FIFO, a regular file is wanted"),
        ("device", "it is a device, a regular file is wanted"),
        ("itself", os.strerror(errno.ELOOP)),
        ("nu\0l", "no file is named so"),
        ("half \ud800", "no file is named so"),
    ]:
        for write in (require_writable, lambda path: write_text(path, "new")):
            with pytest.raises(FileError, match=f"cannot write .*: {said}"):
                write(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["device", "fifo", "itself"]
    assert (tmp_path / "fifo").is_fifo()
    assert (tmp_path / "device").is_char_device()


def test_a_link_stays_and_the_file_that_it_names_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("plan.json")
    for text in ("new", "newer"):
        write_text(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "plan.json").read_text() == text


def test_a_written_file_has_the_rights_of_any_new_file(tmp_path: Path) -> None:
    write_text(tmp_path / "ours", "x")
    (tmp_path / "theirs").write_text("x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "theirs").stat().st_mode


class Sum(Record):
    numbers: tuple[int, ...]

    @cached_property
    def total(self) -> int:
        return sum(self.numbers)


def test_a_changed_copy_has_nothing_that_followed_from_the_old_fields() -> None:
    before = Sum(numbers=(1, 2))
    assert before.total == 3
    assert before.model_copy(update={"numbers": (5,)}).total == 5
    assert before == Sum(numbers=(1, 2))
    assert before.model_dump() == {"numbers": (1, 2)}
