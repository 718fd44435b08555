"""Timings of a folder's disk: a file written until it is on the disk, and read from there again."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from profiles.errors import InputError
from profiles.machine.bench.device import measured
from profiles.machine.cluster import ClusterProfile
from profiles.units import MIB

FILE_BYTES = 256 * MIB
REPEATS = 3
_PIECE_BYTES = 8 * MIB  # of one call: large enough that calls cost nothing beside what they move


def with_disk(
    cluster: ClusterProfile, folder: str | os.PathLike[str], *, size_bytes: int = FILE_BYTES
) -> ClusterProfile:
    """`cluster` with the rates of `folder`, one process alone: median, least and most of three, and
    with what is free there.

    A file of `size_bytes` is written and synchronised to the disk, dropped from the page cache and
    read. Where the system cannot drop it (not Linux, a folder in memory), reading is memory's rate.

    Raises:
        InputError: no folder, or no file can be written there.
    """
    try:
        times = [_lap(Path(folder), size_bytes) for _ in range(REPEATS)]
        free = measured(shutil.disk_usage(folder).free, 0.0)
    except OSError as error:
        raise InputError(
            f"no file of {size_bytes // MIB} MiB can be written in `{os.fspath(folder)}`:"
            f" {error.strerror}",
            hints=["name a folder on the disk that will be used, with room for it"],
        ) from error
    update = {"disk_free_bytes": free}
    for name, seconds in zip(("write", "read"), zip(*times, strict=True), strict=True):
        width = (max(seconds) - min(seconds)) / (max(seconds) + min(seconds))
        update[f"disk_{name}_bytes_per_s"] = measured(
            size_bytes / statistics.median(seconds), width
        )
    return cluster.model_copy(update=update)


def _lap(folder: Path, size_bytes: int) -> tuple[float, float]:
    """Seconds to write and to read one file; it is gone afterwards."""
    piece = os.urandom(min(_PIECE_BYTES, size_bytes))  # a disk that compresses finds nothing to
    count = max(1, size_bytes // len(piece))
    handle, name = tempfile.mkstemp(prefix="bench-", dir=folder)
    try:
        began = time.perf_counter()
        for _ in range(count):
            os.write(handle, piece)
        os.fsync(handle)
        written = time.perf_counter()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(handle, 0, os.SEEK_SET)
        begins = time.perf_counter()
        while os.read(handle, len(piece)):
            pass
        return written - began, time.perf_counter() - begins
    finally:
        os.close(handle)
        os.unlink(name)
