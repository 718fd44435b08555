"""Load a checkpoint: choose a complete save, verify it together, read this rank's chunks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from engines.state.checkpoint.agreement import Peers, all_peers_succeed, on_first
from engines.state.checkpoint.folder import complete_saves, is_checkpoint, step_of
from engines.state.checkpoint.legacy import LegacyReader, is_legacy
from engines.state.checkpoint.manifest import SavedTensor, read_manifest
from engines.state.checkpoint.shard_file import ShardReader, file_problem
from engines.state.checkpoint.training_state import StatesToLoad
from engines.state.checkpoint.values import decode
from profiles.errors import FileError, InputError

Step = int | Literal["newest", "latest"]


class Reader(Protocol):
    """Reads tensors of a save."""

    def tensor(self, name: str) -> Tensor: ...

    def require_readable(self, name: str) -> None: ...

    def read(self, name: str, target: Tensor, *, offsets: Any) -> None: ...


class SavedStates:
    """A verified save that can be read.

    Attributes:
        step: of the training; 0 in checkpoints of release 0.1, which do not say it.
        world_size: ranks that saved it; None where it does not say.
        tensors, values: by name; values are decoded.
        ranks: random states and registered objects of each rank, encoded.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reader: Reader
        self.ranks: list[dict[str, Any]] = []
        self.tensors: Mapping[str, SavedTensor]
        if is_legacy(path):
            legacy = LegacyReader(path)
            self.step, self.world_size = 0, None
            self.reader, self.tensors, self.values = legacy, legacy.tensors, legacy.values
            return
        manifest = read_manifest(path)
        self.step, self.world_size = manifest.step, manifest.world_size
        self.reader, self.tensors = ShardReader(path, manifest), manifest.tensors
        self.values = {
            name: decode(value, self.reader.tensor) for name, value in manifest.values.items()
        }
        self.ranks = manifest.ranks

    @property
    def names(self) -> set[str]:
        """Of all tensors and values."""
        return {*self.tensors, *self.values}

    def of_rank(self, rank: int) -> dict[str, Any]:
        """Decoded random states and objects of the rank that had this number; empty without."""
        if rank >= len(self.ranks):
            return {}
        return {k: decode(v, self.reader.tensor) for k, v in self.ranks[rank].items()}


def has_save(root: Path) -> bool:
    """True if `root` has complete saves, damaged or not, or a checkpoint of release 0.1."""
    return bool(complete_saves(root)) or is_legacy(root)


def open_save(root: Path, *, step: Step, peers: Peers, verify: bool) -> SavedStates:
    """The save that `step` names in `root`, verified; all `peers` call it.

    Args:
        root: of a run's saves, or the folder of one save.
        step: a number; "newest": the one that was saved last; "latest": the last one that is whole,
            with a warning where a newer one is damaged.
        verify: compare all files with their hashes; without it, their sizes.

    Raises:
        FileError: there is none, or it is damaged: nothing was changed. Names a whole one.
        InputError: `step` is something else.
    """
    names = on_first(peers, lambda: [str(path) for path in _candidates(root, step)])
    problem = ""
    for number, name in enumerate(names):
        path = Path(name)
        found_problem = _problem(path, peers, verify=verify)
        if not found_problem:
            if problem and peers.leads:
                warnings.warn(f"{problem}; `{path.name}` is loaded instead", stacklevel=3)
            return SavedStates(path)
        problem = problem or found_problem
        if step != "latest":
            rest = [Path(each) for each in names[number + 1 :]]
            if step != "newest":
                rest = [
                    Path(p) for p in on_first(peers, lambda: list(map(str, complete_saves(root))))
                ]
            other = next(
                (p for p in rest if p != path and not _problem(p, peers, verify=verify)), None
            )
            hints = ["no other save of this folder is whole: load another folder, or begin anew"]
            if other is not None:
                hints = [f"`{other.name}` is whole: `parallel.load(folder, step={step_of(other)})`"]
            raise FileError(problem, hints=hints)
    raise FileError(problem, hints=["no save of this folder is whole"])


def _candidates(root: Path, step: Step) -> list[Path]:
    if not isinstance(step, int) and step not in ("newest", "latest"):
        raise InputError(
            f"`step={step!r}` is no step",
            hints=['give its number, "newest" or "latest"'],
        )
    if is_checkpoint(root):
        return [root]
    saves = complete_saves(root)
    if not saves and is_legacy(root):
        return [root]
    if not saves:
        raise FileError(
            f"`{root}` has no complete checkpoint",
            hints=["name a folder that `parallel.save` wrote"],
        )
    if isinstance(step, int):
        of_step = [path for path in saves if step_of(path) == step]
        if not of_step:
            steps = ", ".join(map(str, sorted({step_of(path) for path in saves})))
            raise FileError(f"`{root}` has no checkpoint of step {step}", hints=[f"it has {steps}"])
        return of_step[:1]
    return saves


def _problem(path: Path, peers: Peers, *, verify: bool) -> str:
    """The first thing wrong with a save; each rank looks at some of its files."""
    problem = ""
    if not is_legacy(path):
        try:
            files = sorted(read_manifest(path).files.items())
        except FileError as error:
            files, problem = [], str(error).splitlines()[0]
        position = peers.ranks.index(peers.rank)
        for name, saved in files[position :: len(peers.ranks)]:
            if verify:
                problem = problem or file_problem(path / name, saved)
            elif not (path / name).is_file() or (path / name).stat().st_size != saved.bytes:
                problem = problem or f"`{name}` is missing or cut off"
    every = peers.gather(problem)
    first = next(filter(None, every), "") if every is not None else ""
    problem = peers.broadcast(first)
    return f"`{path}` is damaged: {problem}" if problem else ""


def fill(saved: SavedStates, states: StatesToLoad, *, peers: Peers, replica: int) -> bool:
    """Read into `states` what this rank has of them; True if the save had all outer states.

    Raises:
        FileError: it belongs to another model or optimizer, and nothing was changed; or a file
            could not be read.
    """
    names = saved.names
    try:
        with all_peers_succeed(peers, f"loading `{saved.path}`"):
            states.require_fit(saved.path, saved.tensors, saved.values)
            for name in states.places(replica=replica, names=names):
                saved.reader.require_readable(name)
        with all_peers_succeed(peers, f"loading `{saved.path}`"):
            for name, target in states.places(replica=replica, names=names).items():
                for chunk in target.chunks:
                    saved.reader.read(name, chunk.part, offsets=chunk.offsets)
    except BaseException:
        states.undo()
        raise
    return states.finish(saved.values, names)
