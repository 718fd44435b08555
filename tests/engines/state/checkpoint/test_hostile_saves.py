"""Saves that a stranger made or changed: nothing outside is touched, and no memory is taken."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.testing import assert_close

from engines.parallel import ParallelModel
from engines.state.checkpoint.folder import CheckpointLock, complete_saves, prune
from engines.state.checkpoint.legacy import TABLE, LegacyReader
from engines.state.checkpoint.manifest import MANIFEST, read_manifest
from engines.state.checkpoint.shard_file import ShardReader, file_problem, write_shard
from engines.state.checkpoint.values import decode, encode
from profiles.errors import FileError, InputError
from tests.engines.cases import CASES
from tests.engines.parity import alone

NAME = "rank-00000.safetensors"


def save(folder: Path, **changes: Any) -> Path:
    """A save of one tensor of four elements, with `changes` to what its manifest says of it."""
    folder.mkdir()
    file = write_shard(folder / NAME, {"w": torch.arange(4.0)})
    chunk = {"offsets": [0], "sizes": [4], "file": NAME, "key": "w"}
    tensor = {"dtype": "float32", "shape": [4], "chunks": [chunk | changes.pop("chunk", {})]}
    data = {
        "step": 1,
        "saved_at": "2025-01-01T00:00:00+00:00",
        "plan": "dp_replicate=1",
        "world_size": 1,
        "versions": {},
        "files": {NAME: file.model_dump()},
        "tensors": {"model.w": tensor | changes.pop("tensor", {})},
        "values": {},
        "ranks": [],
    }
    content = json.dumps({"format": 1, **data, **changes}).encode()
    # A stranger hashes what he likes.
    first = f'{{"sha256": "{hashlib.sha256(content).hexdigest()}", "manifest":\n'
    (folder / MANIFEST).write_bytes(first.encode() + content + b"\n}\n")
    return folder


def test_the_save_itself_is_read(tmp_path: Path) -> None:
    folder = save(tmp_path / "step-00000001")
    whole = ShardReader(folder, read_manifest(folder)).tensor("model.w")
    assert whole.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["../../precious", f"../{NAME}", f"{NAME}/x", "", "/etc/passwd"])
def test_a_manifest_names_no_file_outside_its_folder(tmp_path: Path, name: str) -> None:
    precious = tmp_path / "precious"
    precious.touch()
    root = tmp_path / "runs"
    root.mkdir()
    entry = {"bytes": 0, "sha256": ""}
    for step in (1, 2):
        save(root / f"step-0000000{step}", files={name: entry})
    with pytest.raises(FileError, match="files"):
        read_manifest(root / "step-00000001")
    with pytest.raises(FileError, match="file"):
        read_manifest(save(tmp_path / "other", chunk={"file": name}))
    prune(root, keep_last=1, keep_every=None)
    assert precious.exists()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tensor": {"shape": [2**40]}}, "takes 4,398,046,511,104 bytes"),
        ({"tensor": {"shape": [-1]}}, "greater than or equal to 0"),
        ({"tensor": {"shape": [2, 2]}}, "a tensor of 2 dimensions"),
        ({"tensor": {"shape": []}}, "a tensor of 0 dimensions"),
        ({"tensor": {"dtype": "nn"}}, "unknown dtype"),
        ({"chunk": {"key": "other"}}, "cannot read"),
        ({"chunk": {"offsets": [2]}}, "2 of 4 elements"),
        ({"tensor": {"shape": [5]}, "chunk": {"sizes": [5]}}, "another shape"),
        (
            {"tensor": {"dtype": "complex64", "shape": [2]}, "chunk": {"sizes": [2]}},
            "another shape",
        ),
    ],
)
def test_a_manifest_that_does_not_fit_its_files_is_refused(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    folder = save(tmp_path / "step-00000001", **changes)
    with pytest.raises(FileError, match=complaint):
        ShardReader(folder, read_manifest(folder)).tensor("model.w")


def test_a_manifest_of_deep_values_is_refused(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(201):
        deep = [deep]
    with pytest.raises(FileError, match="nested more than 200 deep"):
        read_manifest(save(tmp_path / "step-00000001", values={"deep": deep}))


def test_states_as_deep_as_can_be_saved_can_be_read(tmp_path: Path) -> None:
    state: dict[Any, Any] = {}
    for _ in range(63):  # and the parts of the innermost key are inside of it
        state = {(1, 2): state}  # a key that is no text takes three levels of JSON
    values = {"deep": encode(state, "deep", {})}
    read = read_manifest(save(tmp_path / "step-00000001", values=values)).values["deep"]
    assert decode(read, lambda name: torch.empty(0)) == state
    with pytest.raises(InputError, match="nested more than 64 deep"):
        encode([state], "deep", {})


def test_fifos_in_the_place_of_files_do_not_block(tmp_path: Path) -> None:
    folder = save(tmp_path / "step-00000001")
    manifest = read_manifest(folder)
    for name in (NAME, MANIFEST):
        (folder / name).unlink()
        os.mkfifo(folder / name)
    with pytest.raises(FileError, match="a FIFO"):
        read_manifest(folder)
    with pytest.raises(FileError, match="a FIFO"):
        ShardReader(folder, manifest).read("model.w", torch.empty(4), offsets=(0,))
    assert "a FIFO" in file_problem(folder / NAME, manifest.files[NAME])
    os.mkfifo(tmp_path / "latest")
    assert complete_saves(tmp_path) == []
    CheckpointLock(tmp_path).release()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_table_of_release_0_1_takes_no_memory_by_its_claims(tmp_path: Path) -> None:
    dcp.save({"model.w": torch.arange(4.0)}, checkpoint_id=tmp_path / "old", no_dist=True)
    assert LegacyReader(tmp_path / "old").tensor("model.w").tolist() == [0, 1, 2, 3]
    claims = [
        b"\x80\x02Nr\xff\xff\xff\x7f.",  # LONG_BINPUT of entry 2^31 - 1: an array of 16 GiB
        b"\x80\x04\x8e" + (2**40).to_bytes(8, "little"),  # BINBYTES8 of a TiB
        b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.",
        pickle.dumps([]),
        b"",
    ]
    for content in claims:
        (tmp_path / "old" / TABLE).write_bytes(content)
        with pytest.raises(FileError, match="cannot be read as a checkpoint"):
            LegacyReader(tmp_path / "old")


GROUPS, NAN = "optimizer.param_groups", {"$float": "nan"}
FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "they are no list": lambda m: m["values"].update({GROUPS: 3}),
    "no list of settings": lambda m: m["values"].update({GROUPS: [7]}),
    "the names of parameters": lambda m: m["values"][GROUPS][0].pop("params"),
    "`x` is no parameter": lambda m: m["values"][GROUPS].append({"lr": 1.0, "params": ["x"]}),
    "is in two of them": lambda m: m["values"][GROUPS].append(m["values"][GROUPS][0]),
    "group 0 has no `lr`": lambda m: m["values"][GROUPS][0].pop("lr"),
    "`lr` is nan, here": lambda m: m["values"][GROUPS][0].update(lr=NAN),
    "`lr` is -1, here": lambda m: m["values"][GROUPS][0].update(lr=-1),
    "`lr` is '0.1', here": lambda m: m["values"][GROUPS][0].update(lr="0.1"),
    "`lr` is None, here": lambda m: m["values"][GROUPS][0].update(lr=None),
    "`betas` is": lambda m: m["values"][GROUPS][0].update(betas=[0.9]),
    "`amsgrad` is": lambda m: m["values"][GROUPS][0].update(amsgrad=[]),
    "`initial_lr` is nan": lambda m: m["values"][GROUPS][0].update(initial_lr=NAN),
    "exp_avg` is 'x' there": lambda m: m["values"].update({_moved(m, ".exp_avg"): "x"}),
    "bias` is 1 there": lambda m: m["values"].update({_moved(m, ".bias"): 1}),
    "random states": lambda m: m["ranks"][0]["random"].update(torch="x"),
}


def _moved(manifest: dict[str, Any], end: str) -> str:
    """The name of a tensor that the manifest no longer has."""
    name = next(name for name in manifest["tensors"] if name.endswith(end))
    del manifest["tensors"][name]
    return str(name)


def _everything(parallel: ParallelModel) -> list[Any]:
    """Tensors of model and optimizer, and its settings."""
    states = [list(state.values()) for state in parallel.optimizer.state.values()]
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in parallel.optimizer.param_groups
    ]
    return deepcopy([list(parallel.module.state_dict().values()), states, groups, parallel.step])


def test_a_forged_state_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    case = CASES["gpt"]
    (_, parallel), (_, other) = (alone("gpt", optimizer=torch.optim.AdamW) for _ in range(2))
    for rows in (4, 5):
        parallel.train_step(case.batch(rows))
    other.train_step(case.batch(4))
    before, whole = _everything(parallel), other.save(tmp_path / "whole")
    for number, (complaint, forge) in enumerate(FORGERIES.items()):
        folder = tmp_path / str(number) / whole.name
        shutil.copytree(whole, folder)
        manifest = read_manifest(folder)
        data = manifest.model_dump()
        forge(data)
        (folder / MANIFEST).write_bytes(type(manifest).model_validate(data).to_bytes())
        with pytest.raises(FileError, match=complaint):
            parallel.load(folder)
        assert_close(_everything(parallel), before, rtol=0, atol=0)
    parallel.load(whole)
    assert_close(_everything(parallel), _everything(other), rtol=0, atol=0)
