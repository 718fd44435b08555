"""The folder of a run: names, retention, what is cleared, and who may save there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engines.parallel import ParallelModel
from engines.state.checkpoint import folder as folder_module
from engines.state.checkpoint.folder import SaveFolder, complete_saves, lock, prune, unlock
from engines.state.checkpoint.manifest import MANIFEST, Manifest, SavedFile, file_of
from profiles.errors import FileError, InputError
from tests.engines.cases import CASES
from tests.engines.parity import alone


def save(root: Path, step: int) -> Path:
    """A complete save of one file."""
    new = SaveFolder(root, step=step, ranks=[0])
    (new.partial / file_of(0)).write_bytes(b"tensors")
    manifest = Manifest(
        step=step, saved_at="", plan="", world_size=1, versions={}, tensors={}, values={}, ranks=[],
        files={file_of(0): SavedFile(bytes=7, sha256="")},
    )  # fmt: skip
    return new.commit(manifest)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_each_save_has_a_folder_and_the_pointer_names_the_last(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    save(tmp_path, 10)  # trained again from an older save
    assert names(tmp_path) == [
        "latest",
        "lock",
        "step-00000010",
        "step-00000010.1",
        "step-00000020",
    ]
    assert (tmp_path / "latest").read_text() == "step-00000010.1\n"
    assert complete_saves(tmp_path)[0].name == "step-00000010.1"


@pytest.mark.parametrize("pointer", ["", "step-00000099", "../elsewhere", "\xff"])
def test_without_a_good_pointer_the_newest_save_comes_first(tmp_path: Path, pointer: str) -> None:
    for number, step in enumerate((10, 30, 20)):
        path = save(tmp_path, step)
        os.utime(path / MANIFEST, ns=(number, number))
    (tmp_path / "latest").write_bytes(pointer.encode("latin-1"))
    assert [path.name[-2:] for path in complete_saves(tmp_path)] == ["20", "30", "10"]


def test_the_last_saves_and_every_kth_are_retained(tmp_path: Path) -> None:
    for number, step in enumerate(range(5, 55, 5)):
        path = save(tmp_path, step)
        os.utime(path / MANIFEST, ns=(number, number))
    prune(tmp_path, keep_last=2, keep_every=20)
    steps = [int(path.name[-2:]) for path in complete_saves(tmp_path)]
    assert sorted(steps) == [20, 40, 45, 50]
    assert not [name for name in names(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "all"])
def test_fewer_than_one_save_is_never_retained(tmp_path: Path, wrong: Any) -> None:
    """-1 is all saves in other libraries: here it would delete all but the last one."""
    parallel = three_saves(tmp_path)
    for options in ({"keep_last": wrong}, {"keep_last": 1, "keep_every": wrong}):
        with pytest.raises(InputError, match=f"={wrong}` wants one or more, a whole number"):
            parallel.save(tmp_path, **options)
    with pytest.raises(InputError, match=f"`keep_last={wrong}` wants one or more"):
        parallel.fit([], steps=9, save=tmp_path, keep_last=wrong)
    assert len(complete_saves(tmp_path)) == 3


def test_files_that_no_manifest_names_are_never_deleted(tmp_path: Path) -> None:
    (save(tmp_path, 1) / "notes.txt").write_text("mine")
    (tmp_path / "step-00000001.old").mkdir()
    (tmp_path / "step-00000001.partial").mkdir()
    (tmp_path / ".partial-mine").mkdir()
    (tmp_path / ".partial-mine" / "rank-00000.safetensors").write_text("no plan names it")
    save(tmp_path, 2)
    prune(tmp_path, keep_last=1, keep_every=None)
    everything = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")]
    for name in (
        "step-00000001.old",
        "step-00000001.partial",
        ".partial-mine/rank-00000.safetensors",
    ):
        assert name in everything
    assert any(name.endswith("notes.txt") for name in everything)


def test_a_save_that_died_is_cleared_by_the_next(tmp_path: Path) -> None:
    dead = SaveFolder(tmp_path, step=1, ranks=[0])
    (dead.partial / file_of(0)).write_bytes(b"half of the tens")
    save(tmp_path, 2)
    assert names(tmp_path) == ["latest", "lock", "step-00000002"]


@pytest.mark.parametrize("left", ["folder", "list", "manifest"])
def test_a_save_that_died_first_or_last_is_cleared_too(tmp_path: Path, left: str) -> None:
    """Before its list of files or in it, and between its manifest and its name."""
    dead = SaveFolder(tmp_path, step=1, ranks=[0])
    planned = dead.partial / "files.json"
    if left == "list":
        planned.write_text('["rank-0')
    else:
        planned.unlink()
    if left == "manifest":
        complete = save(tmp_path / "other", 1)
        for path in complete.iterdir():
            path.rename(dead.partial / path.name)
    (tmp_path / ".latest-0123abcd").write_text("step-00000001\n")
    save(tmp_path, 2)
    assert names(tmp_path) == [
        "latest",
        "lock",
        *(["other"] * (left == "manifest")),
        "step-00000002",
    ]


def test_a_link_in_place_of_a_save_is_not_followed(tmp_path: Path) -> None:
    other, root = tmp_path / "other", tmp_path / "run"
    other.mkdir()
    root.mkdir()
    (root / "step-00000001").symlink_to(other)
    (root / ".partial-link").symlink_to(other)
    assert save(root, 1).name == "step-00000001.1"
    assert not list(other.iterdir())


ANOTHER_JOB = """
import sys
from pathlib import Path
from engines.state.checkpoint.folder import lock
lock(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def test_another_live_job_is_named_and_a_dead_one_is_not_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "PATIENCE_S", 0.0)
    with subprocess.Popen(
        [sys.executable, "-c", ANOTHER_JOB, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(FileError, match=rf"another job saves .*process {other.pid} on "):
            lock(tmp_path)
        other.kill()
    lock(tmp_path)
    unlock(tmp_path)


def three_saves(root: Path) -> ParallelModel:
    _, parallel = alone("gpt")
    for _ in range(3):
        parallel.train_step(CASES["gpt"].batch(4))
        parallel.save(root)
    return parallel


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("file", [MANIFEST, file_of(0)])
def test_a_damaged_save_is_refused_before_a_weight_is_touched(tmp_path: Path, file: str) -> None:
    parallel = three_saves(tmp_path)
    damage(tmp_path / "step-00000003" / file)
    before = {name: value.clone() for name, value in parallel.state_dict().items()}
    with pytest.raises(FileError, match="step-00000003` is damaged") as caught:
        parallel.load(tmp_path)
    assert "`step-00000002` is whole: `parallel.load(folder, step=2)`" in str(caught.value)
    after = parallel.state_dict()
    assert all((after[name] == value).all() for name, value in before.items())
    assert parallel.load(tmp_path, step=2) == 2


def test_latest_takes_the_newest_whole_save_and_says_so(tmp_path: Path) -> None:
    parallel = three_saves(tmp_path)
    damage(tmp_path / "step-00000003" / file_of(0))
    (tmp_path / "step-00000002" / file_of(0)).unlink()
    with pytest.warns(UserWarning, match=r"00003` is damaged.*`step-00000001` is loaded instead"):
        assert parallel.load(tmp_path, step="latest") == 1
    assert parallel.step == 1
    damage(tmp_path / "step-00000001" / file_of(0))
    with pytest.raises(FileError, match="step-00000003` is damaged") as caught:
        parallel.load(tmp_path)
    assert "no other save of this folder is whole" in str(caught.value)


def test_without_verification_sizes_are_compared_all_the_same(tmp_path: Path) -> None:
    parallel = three_saves(tmp_path)
    path = tmp_path / "step-00000003" / file_of(0)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(FileError, match="is missing or cut off"):
        parallel.load(tmp_path, verify=False)


def test_a_step_that_was_not_saved_is_an_error_with_those_that_were(tmp_path: Path) -> None:
    parallel = three_saves(tmp_path)
    with pytest.raises(FileError, match="no checkpoint of step 7") as caught:
        parallel.load(tmp_path, step=7)
    assert "it has 1, 2, 3" in str(caught.value)


@pytest.mark.parametrize("step", ["last", None, 2.0])
def test_a_step_that_is_none_is_refused(tmp_path: Path, step: Any) -> None:
    """Else the newest one would be loaded in its place."""
    parallel = three_saves(tmp_path)
    with pytest.raises(InputError, match=r"is no step"):
        parallel.load(tmp_path, step=step)


def test_folders_above_a_run_are_made(tmp_path: Path) -> None:
    save(tmp_path / "runs" / "today", 10)
    assert "step-00000010" in names(tmp_path / "runs" / "today")
