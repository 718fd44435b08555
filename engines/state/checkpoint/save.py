"""Save a checkpoint: plan who writes which chunk, write, and commit when all is on the disk.

All that needs collectives is done first; the files may then be written by a thread while the
training goes on.
"""

from __future__ import annotations

import logging
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.state.checkpoint.agreement import Peers, Results, on_first
from engines.state.checkpoint.folder import SaveFolder, prune, sync_folder
from engines.state.checkpoint.manifest import Manifest, SavedChunk, SavedFile, SavedTensor, file_of
from engines.state.checkpoint.param_groups import merged_groups
from engines.state.checkpoint.shard_file import write_shard
from engines.state.checkpoint.training_state import GROUPS, NamedStates
from engines.state.checkpoint.values import encode
from engines.state.shard_spec import placed
from profiles.errors import AdvisorError, FileError
from profiles.units import MIB

log = logging.getLogger(__name__)

SLOWEST_DISK = 5 * MIB
"""Bytes a second that a save is given at least, beside the job's own time limit."""


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """Name of a save, and the older ones that may go.

    Attributes:
        step: of the training.
        plan: as its text.
        keep_last: newest saves to retain; None: all.
        keep_every: steps that this divides are retained whatever `keep_last` says.
    """

    step: int
    plan: str
    keep_last: int | None = None
    keep_every: int | None = None


class CheckpointSave:
    """A save whose files are being written; `wait` returns the folder when it is complete.

    One that fails in the background is warned of at once: a script may end without a `wait`.

    Args:
        warns: of it, on this rank.
    """

    def __init__(self, work: Callable[[], Path], *, background: bool, warns: bool = False) -> None:
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._work, self._warns = work, warns and background
        self.was_waited_for = False
        self._thread: threading.Thread | None = None
        if background:
            # Not a daemon: a script that ends right after it waits for the files.
            self._thread = threading.Thread(target=self._run, name="checkpoint")
            self._thread.start()
        else:
            self._run()

    @classmethod
    def done(cls, path: Path) -> CheckpointSave:
        """Of a rank that has nothing to write."""
        return cls(lambda: path, background=False)

    def wait(self) -> Path:
        """The folder of the complete save.

        Raises:
            FileError: a file could not be written; the older saves are as they were.
            RankError: names the rank that did not finish in time.
        """
        self.was_waited_for = True
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path

    def _run(self) -> None:
        try:
            self._path = self._work()
        except BaseException as error:
            self._error = error
            if self._warns and not self.was_waited_for:
                log.warning("the save in the background failed: %s", _line(error))


def start_saving(
    root: Path,
    states: NamedStates,
    own: dict[str, Any],
    *,
    peers: Peers,
    options: SaveOptions,
    timeout_s: float,
    background: bool = False,
) -> CheckpointSave:
    """Begin a save into a new folder in `root`; all `peers` call it.

    Args:
        own: random states and objects of this rank, saved for each rank.
        background: copy the chunks to host memory and return; a thread writes them.

    Raises:
        FileError: the folder cannot be made, or another job saves there.
        InputError: a value that checkpoints cannot hold.
    """
    prefix = f"rank{peers.rank}"
    loose: dict[str, Tensor] = {}
    own_error: AdvisorError | None = None
    encoded, values = dict[str, Any](), dict[str, Any]()
    try:
        encoded = {key: encode(value, f"{prefix}.{key}", loose) for key, value in own.items()}
        values = {
            key: encode(value, f"{prefix}.value.{key}", loose)
            for key, value in states.values.items()
        }
    except AdvisorError as error:
        own_error = error
    tensors = states.tensors | {name: placed(tensor) for name, tensor in loose.items()}
    described = {
        "tensors": {
            name: [
                str(each.chunks[0].part.dtype).removeprefix("torch.") if each.chunks else "",
                list(each.whole),
                [[list(c.offsets), list(c.part.shape), c.part.nbytes] for c in each.chunks],
            ]
            for name, each in tensors.items()
        },
        "values": values,
        "own": encoded,
        "failure": "" if own_error is None else _line(own_error),
    }
    every = peers.gather(described)
    folder: SaveFolder | None = None

    def prepare() -> dict[str, Any]:
        nonlocal folder
        assert every is not None
        for rank, of_rank in zip(peers.ranks, every, strict=True):
            if of_rank["failure"]:
                raise own_error or FileError(f"rank {rank}: {of_rank['failure']}")
        own, most_bytes = _shared_out(every, peers.ranks)
        folder = SaveFolder(root, step=options.step, ranks=peers.ranks)
        return {"partial": str(folder.partial), "own": own, "most_bytes": most_bytes}

    with _own_error_first(own_error):
        plan = on_first(peers, prepare)
    partial, position = Path(plan["partial"]), peers.ranks.index(peers.rank)
    mine: dict[str, Tensor] = {}
    for name, number in plan["own"][position]:
        chunk = tensors[name].chunks[number]
        part = chunk.part.to("cpu", copy=True) if background else chunk.part
        mine[_key(name, chunk.offsets, chunk.part.shape, tensors[name].whole)] = part
    limit_s = timeout_s + plan["most_bytes"] / SLOWEST_DISK
    results = Results(peers, partial.name)

    def write() -> Path:
        own_error: BaseException | None = None
        try:
            saved = write_shard(partial / file_of(peers.rank), mine)
            sync_folder(partial)
            results.publish({"bytes": saved.bytes, "sha256": saved.sha256})
        except BaseException as error:  # of any kind: the other ranks wait for a word
            own_error = error
            results.publish({"failure": _line(error)})
        try:
            if peers.leads:
                assert every is not None
                assert folder is not None
                return _commit(
                    folder, every, plan["own"], peers, results, options, states.order, limit_s
                )
            end = results.hear(timeout_s=limit_s)
            if "failure" in end:
                raise FileError(f"cannot write `{root}`: {end['failure']}")
            return Path(end["path"])
        except AdvisorError as error:
            if own_error is None or isinstance(own_error, Exception):
                raise error from own_error
            raise own_error from None  # Ctrl-C ends a script that goes on without a save too

    return CheckpointSave(write, background=background, warns=peers.leads)


def _commit(
    folder: SaveFolder,
    every: list[dict[str, Any]],
    plan: list[list[tuple[str, int]]],
    peers: Peers,
    results: Results,
    options: SaveOptions,
    order: list[str],
    timeout_s: float,
) -> Path:
    """Collect the ranks' files, write the manifest and give the folder its name."""
    try:
        written = results.collect(timeout_s=timeout_s)
        for rank, result in zip(peers.ranks, written, strict=True):
            if "failure" in result:
                raise FileError(f"rank {rank}: {result['failure']}")
            path = folder.partial / file_of(rank)
            if not path.is_file() or path.stat().st_size != result["bytes"]:
                raise FileError(
                    f"rank {peers.rank} does not see the file of rank {rank}, `{path.name}`",
                    hints=["save to a folder that all nodes share"],
                )
        files = {
            file_of(rank): SavedFile(**result)
            for rank, result in zip(peers.ranks, written, strict=True)
        }
        target = folder.commit(_manifest(every, plan, peers, files, options, order))
    except BaseException as error:
        folder.abandon()
        results.announce({"failure": _line(error)})
        if isinstance(error, OSError):
            raise FileError(f"cannot write `{folder.root}`: {error}") from None
        if isinstance(error, FileError):
            error.what = f"cannot write `{folder.root}`: {error.what}"
        raise
    prune(folder.root, keep_last=options.keep_last, keep_every=options.keep_every)
    results.announce({"path": str(target)})
    return target


def _manifest(
    every: list[dict[str, Any]],
    plan: list[list[tuple[str, int]]],
    peers: Peers,
    files: dict[str, SavedFile],
    options: SaveOptions,
    order: list[str],
) -> Manifest:
    tensors: dict[str, SavedTensor] = {}
    chunks: dict[str, list[SavedChunk]] = {}
    for rank, described, own in zip(peers.ranks, every, plan, strict=True):
        for name, number in own:
            dtype, shape, boxes = described["tensors"][name]
            offsets, sizes, _ = boxes[number]
            key = _key(name, offsets, sizes, shape)
            chunk = SavedChunk(
                offsets=tuple(offsets), sizes=tuple(sizes), file=file_of(rank), key=key
            )
            chunks.setdefault(name, []).append(chunk)
            tensors[name] = SavedTensor(dtype=dtype, shape=tuple(shape), chunks=())
    values = {}
    for described in reversed(every):
        values.update(described["values"])
    values[GROUPS] = merged_groups([each["values"][GROUPS] for each in every], order)
    return Manifest(
        step=options.step,
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        plan=options.plan,
        world_size=len(peers.ranks),
        versions=_versions(),
        files=files,
        tensors={
            name: saved.model_copy(update={"chunks": tuple(chunks[name])})
            for name, saved in tensors.items()
        },
        values=values,
        ranks=[described["own"] for described in every],
    )


@contextmanager
def _own_error_first(error: AdvisorError | None) -> Iterator[None]:
    """Around what raises for an error of any rank: raise `error`, of this one, in its place."""
    try:
        yield
    except AdvisorError as of_any:
        raise error or of_any from None


def _line(error: BaseException) -> str:
    """The first line of an error, with its type where its text is not meant for users."""
    first = (str(error).splitlines() or [""])[0]
    if isinstance(error, OSError | AdvisorError) and first:
        return first
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _versions() -> dict[str, str]:
    try:
        own = metadata.version("parallel-advisor")
    except metadata.PackageNotFoundError:
        own = "unknown"
    return {
        "parallel-advisor": own,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _shared_out(
    every: list[dict[str, Any]], ranks: list[int]
) -> tuple[list[list[tuple[str, int]]], int]:
    """For each rank the (tensor, chunk number) that it writes, and the most bytes of a rank.

    A chunk that several ranks have goes to the one with the least to write so far.

    Raises:
        FileError: ranks have tensors of one name and different shapes or dtypes.
    """
    holders: dict[str, list[tuple[int, str, int, int]]] = {}
    shapes: dict[str, tuple[int, Any]] = {}
    for position, described in enumerate(every):
        for name, (dtype, shape, boxes) in described["tensors"].items():
            if not boxes:
                continue
            first, known = shapes.setdefault(name, (position, (dtype, shape)))
            if known != (dtype, shape):
                raise FileError(
                    f"ranks {ranks[first]} and {ranks[position]} have different `{name}`:"
                    f" {known[0]} {known[1]}, {dtype} {shape}"
                )
            for number, (offsets, sizes, nbytes) in enumerate(boxes):
                box = f"{name}{offsets}{sizes}"
                holders.setdefault(box, []).append((position, name, number, nbytes))
    load = [0] * len(every)
    plan: list[list[tuple[str, int]]] = [[] for _ in every]
    for candidates in holders.values():
        position, name, number, nbytes = min(candidates, key=lambda each: (load[each[0]], each[0]))
        load[position] += nbytes
        plan[position].append((name, number))
    return plan, max(load)


def _key(name: str, offsets: Any, sizes: Any, whole: Any) -> str:
    """Name of a chunk in its file: the tensor's own where the chunk is all of it."""
    if list(sizes) == list(whole):
        return name
    box = ",".join(f"{low}:{low + size}" for low, size in zip(offsets, sizes, strict=True))
    return f"{name}[{box}]"
