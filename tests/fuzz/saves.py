"""Checkpoints: damaged by chance, and forged by somebody who hashes what he changed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import torch

from engines.parallel import ParallelModel
from engines.state.checkpoint.manifest import MANIFEST, file_of
from tests.engines.cases import CASES
from tests.engines.parity import alone
from tests.fuzz.mutations import flip, mutated
from tests.fuzz.readers import Reader

STEP, OTHER = 2, 1
SHARD = file_of(0)


@dataclass(frozen=True)
class Trained:
    """A model, the folder of its saves, and the states that were saved."""

    parallel: ParallelModel
    root: Path
    states: dict[int, dict[str, torch.Tensor]]


@cache
def _trained() -> Trained:
    root = Path(tempfile.mkdtemp(prefix="fuzz-saves-"))
    _, parallel = alone("gpt", optimizer=lambda p: torch.optim.AdamW(p, lr=0.01))
    states = {}
    for step in (OTHER, STEP):
        parallel.train_step(CASES["gpt"].batch(4))
        parallel.save(root)
        states[step] = _state(parallel)
    return Trained(parallel, root, states)


def _state(parallel: ParallelModel) -> dict[str, torch.Tensor]:
    state = {name: value.clone() for name, value in parallel.state_dict().items()}
    for number, each in enumerate(parallel.optimizer.state.values()):
        state |= {f"{number}.{n}": v.clone() for n, v in each.items() if torch.is_tensor(v)}
    return state


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@dataclass(frozen=True)
class _Damaged(Reader):
    """A save of which something is changed."""

    change: Callable[[Path, Random], None] = lambda folder, random: None

    def write(self, folder: Path, random: Random) -> Path:
        target = folder / "root"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(_trained().root, target)
        self.change(target / f"step-{STEP:08d}", random)
        return target


def _damage(folder: Path, random: Random) -> None:
    """A bit, an end, a byte or a whole file, of any file of the newest save or of the pointer."""
    path = random.choice(
        (folder / MANIFEST, folder / SHARD, folder / SHARD, folder.parent / "latest")
    )
    content = path.read_bytes()
    match random.randrange(10):
        case 0 | 1 | 2 | 3:
            path.write_bytes(flip(content, random))
        case 4 | 5:
            path.write_bytes(content[: random.randrange(len(content))])
        case 6:
            place = random.randrange(len(content))
            path.write_bytes(content[:place] + b"\0" * random.choice((1, 4096)) + content[place:])
        case 7:
            place, length = random.randrange(len(content)), random.choice((1, 512, 4096))
            path.write_bytes(content[:place] + b"\0" * length + content[place + length :])
        case 8:
            path.unlink()
            _in_its_place(path, random)
        case _:
            other = folder.parent / f"step-{OTHER:08d}" / path.name
            path.write_bytes(other.read_bytes() if other.exists() else content + content)


def _in_its_place(path: Path, random: Random) -> None:
    match random.randrange(6):
        case 0:
            os.mkfifo(path)
        case 1:
            path.mkdir()
        case 2:
            path.symlink_to(path.name)
        case 3:
            path.symlink_to("/dev/zero")
        case 4:
            path.symlink_to("/etc/passwd")
        case _:
            pass


def _forge(folder: Path, random: Random) -> None:
    """Another manifest, or another header of the tensors' file, with the hashes that it needs."""
    manifest = json.loads((folder / MANIFEST).read_bytes())["manifest"]
    if random.random() < 0.3:
        content = _other_header((folder / SHARD).read_bytes(), random)
        (folder / SHARD).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        manifest["files"][SHARD] = {"bytes": len(content), "sha256": digest}
        body = json.dumps(manifest).encode()
    else:
        body = mutated(json.dumps(manifest).encode(), random)
    first = f'{{"sha256": "{hashlib.sha256(body).hexdigest()}", "manifest":\n'.encode()
    (folder / MANIFEST).write_bytes(first + body + b"\n}\n")


def _other_header(content: bytes, random: Random) -> bytes:
    size = int.from_bytes(content[:8], "little")
    header = mutated(content[8 : 8 + size], random)
    length = random.choice((len(header), len(header), len(header), size, 2**40, 2**63))
    return length.to_bytes(8, "little") + header + content[8 + size :]


def _load(root: Path) -> object:
    """Load the newest: what was saved, or an error and nothing changed."""
    trained = _trained()
    parallel, before = trained.parallel, _state(trained.parallel)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            parallel.load(root)
        except BaseException:
            if not _equal(_state(parallel), before):
                return "a refused load changed states"
            raise
    if not any(_equal(_state(parallel), state) for state in trained.states.values()):
        return "other states were loaded"
    return None


def _load_forged(root: Path) -> object:
    """The states may be others, whoever forges them chooses; a refusal still changes nothing."""
    wrong = _load(root)
    return None if wrong == "other states were loaded" else wrong


def _old(path: Path) -> None:
    from engines.state.checkpoint.legacy import LegacyReader

    (path.parent / "__0_0.distcp").write_bytes(_release_0_1()[1])
    reader = LegacyReader(path.parent)
    for name in reader.tensors:
        reader.tensor(name)


@cache
def _release_0_1() -> list[bytes]:
    import torch.distributed.checkpoint as dcp

    folder = Path(tempfile.mkdtemp(prefix="fuzz-old-"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model.w": torch.arange(4.0), "n": 3}, checkpoint_id=folder, no_dist=True)
    return [(folder / ".metadata").read_bytes(), (folder / "__0_0.distcp").read_bytes()]


def _none() -> list[bytes]:
    return []


def checkpoints() -> Iterator[Reader]:
    """Readers of saves."""
    yield _Damaged("checkpoint", "", _load, _none, _damage)
    yield _Damaged("checkpoint-forged", "", _load_forged, _none, _forge)
    yield Reader("checkpoint-0.1", ".metadata", _old, lambda: _release_0_1()[:1])


def clean() -> None:
    """Remove the saves that cases were made from."""
    if _trained.cache_info().currsize:
        shutil.rmtree(_trained().root, ignore_errors=True)
