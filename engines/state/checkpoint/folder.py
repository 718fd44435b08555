"""The root folder of a run's checkpoints: one folder for each save, and a pointer to the newest.

    runs/gpt/
        latest                      "step-00001200", replaced atomically after each save
        lock                        the job that saves here
        step-00000600/              complete: renamed to this name when all is on the disk
            manifest.json
            rank-00000.safetensors
        step-00001200/
        .partial-step-00001800-5f0c93d2/    being written, or left by a job that died

Files that no manifest of ours names are never deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
import time
import warnings
from collections.abc import Iterable
from pathlib import Path

from engines.state.checkpoint.manifest import FILE_NAME, MANIFEST, Manifest, file_of, read_manifest
from profiles.errors import FileError, InputError
from profiles.record import json_value, read_text
from profiles.record.bounds import is_whole
from profiles.units import KIB

LATEST, LOCK, PLANNED = "latest", "lock", "files.json"
STEP = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_PARTIAL, _DELETED = ".partial-", ".deleted-"
_POINTER = re.compile(rf"\.{LATEST}-[0-9a-f]{{8}}")
"""One that was not renamed to `latest` any more."""
PATIENCE_S = 5.0
"""Time that a job which was told to end has left to let go of the folder."""
_LOCKS: dict[str, CheckpointLock] = {}


def is_checkpoint(path: Path) -> bool:
    """True if `path` is the folder of one complete save."""
    return (path / MANIFEST).is_file()


def step_of(path: Path) -> int:
    """The step in the name of a save's folder; -1 where it has none."""
    match = STEP.fullmatch(path.name)
    return int(match[1]) if match else -1


def complete_saves(root: Path) -> list[Path]:
    """Folders of the complete saves in `root`: that of the pointer first, then newest first."""
    try:
        saves = [path for path in root.iterdir() if STEP.fullmatch(path.name)]
    except OSError:
        return []
    saves = [path for path in saves if is_checkpoint(path)]
    pointed = root / _pointer(root)
    return sorted(
        saves, key=lambda path: (path == pointed, _saved_ns(path), path.name), reverse=True
    )


def _pointer(root: Path) -> str:
    try:
        return read_text(root / LATEST, most=KIB).strip()
    except FileError:
        return ""


def _saved_ns(path: Path) -> int:
    with contextlib.suppress(OSError):
        return (path / MANIFEST).stat().st_mtime_ns
    return 0


class SaveFolder:
    """One save on its way: files are written into `partial`, which `commit` gives its name.

    The first rank of a job makes it, commits it, and removes what it may remove.
    """

    def __init__(self, root: Path, *, step: int, ranks: Iterable[int]) -> None:
        """Lock `root`, clear what dead saves left in it, and make `partial`.

        Raises:
            FileError: another job saves here, or the folder cannot be written.
        """
        self.root, self.step = root, step
        self.files = [file_of(rank) for rank in ranks]
        try:
            root.mkdir(parents=True, exist_ok=True)
            lock(root)
            _clear(root)
            name = f"{_PARTIAL}step-{step:08d}-{secrets.token_hex(4)}"
            self.partial = root / name
            self.partial.mkdir()
            _write_new(self.partial / PLANNED, json.dumps(self.files).encode())
        except OSError as error:
            raise FileError(f"cannot write `{root}`: {error.strerror}") from None

    def commit(self, manifest: Manifest) -> Path:
        """Write the manifest, give the folder its name and let the pointer name it."""
        _write_new(self.partial / MANIFEST, manifest.to_bytes())
        (self.partial / PLANNED).unlink()
        sync_folder(self.partial)
        target = self.root / f"step-{self.step:08d}"
        number = 0
        while os.path.lexists(target):  # this step was saved before
            number += 1
            target = self.root / f"step-{self.step:08d}.{number}"
        os.rename(self.partial, target)
        sync_folder(self.root)
        temporary = self.root / f".{LATEST}-{secrets.token_hex(4)}"
        _write_new(temporary, f"{target.name}\n".encode())
        os.replace(temporary, self.root / LATEST)
        sync_folder(self.root)
        return target

    def abandon(self) -> None:
        """Remove the files of a save that failed."""
        with contextlib.suppress(OSError):
            _remove(self.partial, [*self.files, MANIFEST, PLANNED])


def require_retention(*, keep_last: int | None, keep_every: int | None) -> None:
    """Check numbers of saves to retain, before any is written.

    Raises:
        InputError: less than one: -1 is all of them elsewhere, and would be the last one here.
    """
    for name, number in (("keep_last", keep_last), ("keep_every", keep_every)):
        if number is not None and not is_whole(number, least=1):
            raise InputError(
                f"`{name}={number}` wants one or more, a whole number",
                hints=["None, the default, retains all saves"],
            )


def prune(root: Path, *, keep_last: int | None, keep_every: int | None) -> None:
    """Delete complete saves beyond the `keep_last` newest, but not steps that `keep_every` divides.

    None keeps all. The save that the pointer names is always kept.
    """
    if keep_last is None:
        return
    for path in complete_saves(root)[max(1, keep_last) :]:
        if keep_every and step_of(path) % keep_every == 0:
            continue
        with contextlib.suppress(OSError, FileError):
            # Renamed first: an interrupted deletion leaves nothing that looks complete.
            dying = root / f"{_DELETED}{path.name}-{secrets.token_hex(4)}"
            os.rename(path, dying)
            _delete(dying)


def _clear(root: Path) -> None:
    """Remove what saves and deletions left that were interrupted; this job has the lock."""
    for path in root.iterdir():
        with contextlib.suppress(OSError, FileError):
            if path.is_symlink():
                continue
            if path.name.startswith(_DELETED):
                _delete(path)
            elif path.name.startswith(_PARTIAL):
                _remove(path, [*_planned(path), MANIFEST, PLANNED])
            elif _POINTER.fullmatch(path.name):
                path.unlink()


def _planned(partial: Path) -> list[str]:
    """Files of an interrupted save: as it planned them; as its manifest has them, from when all
    were written on; none where it died before both, and so before the first of them."""
    try:
        if (partial / PLANNED).exists():
            names = json_value(read_text(partial / PLANNED))
        else:
            names = list(read_manifest(partial).files)
        return [name for name in names if FILE_NAME.fullmatch(name)]
    except (OSError, FileError, ValueError, TypeError):
        return []


def _delete(path: Path) -> None:
    files = list(read_manifest(path).files) if is_checkpoint(path) else []
    _remove(path, [*files, MANIFEST])


def _remove(path: Path, names: list[str]) -> None:
    """Unlink the files named, the last one last, then the folder if nothing else is in it."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            (path / name).unlink()
    path.rmdir()


def _write_new(path: Path, content: bytes) -> None:
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the folder's names."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class CheckpointLock:
    """The right to save into a folder: one process on all machines that share it, while it lives.

    The kernel frees it when the process ends, however it ends; forked workers do not inherit it.
    """

    def __init__(self, root: Path) -> None:
        """Raises FileError where another live job has it for longer than `PATIENCE_S`."""
        self._path = root / LOCK
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() > deadline:
                    raise self._taken() from None
                time.sleep(0.1)
            except OSError as error:  # a file system without locks
                warnings.warn(
                    f"`{root}` cannot be locked ({error.strerror}): do not let two jobs save there",
                    stacklevel=2,
                )
                return
        os.ftruncate(self._file, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        owner = f"process {os.getpid()} on {socket.gethostname()} since {since}\n"
        os.pwrite(self._file, owner.encode(), 0)

    def is_current(self) -> bool:
        """False where the folder was deleted, and maybe made again, after it was locked."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(self._file), os.stat(self._path))
        return False

    def release(self) -> None:
        """Let other jobs save here."""
        os.close(self._file)

    def _taken(self) -> FileError:
        owner = os.pread(self._file, 500, 0).decode(errors="replace").strip()
        os.close(self._file)
        return FileError(
            f"another job saves its checkpoints in `{self._path.parent}`:"
            f" {owner or 'another process'}",
            hints=["give each job a folder of its own, or end the other one first"],
        )


def lock(root: Path) -> None:
    """Take the lock of `root` for this process, once, until it ends or `unlock` is called."""
    key = os.path.realpath(root)
    if key in _LOCKS and not _LOCKS[key].is_current():
        unlock(root)
    if key not in _LOCKS:
        _LOCKS[key] = CheckpointLock(root)


def unlock(root: Path) -> None:
    """Give the lock of `root` back."""
    taken = _LOCKS.pop(os.path.realpath(root), None)
    if taken is not None:
        taken.release()
