"""Documents that are kept between runs, in the user's cache folder: few, and never relied on.

A file or folder that cannot be read or written, or that others may have written, is as if it were
not there, and one warning says so. Where there is no home folder nothing is kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from profiles.errors import AdvisorError
from profiles.record import Document
from profiles.record.reading import not_private

log = logging.getLogger(__name__)

DISTRIBUTION = "parallel-advisor"
# A file is some KiB: a hundred are a megabyte, and more models than one person works on.
MOST_FILES = 100

DocumentT = TypeVar("DocumentT", bound=Document)
_warned: set[Path] = set()


def cache_folder() -> Path | None:
    """$XDG_CACHE_HOME/parallel-advisor, else ~/.cache/parallel-advisor; None without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification: a path that is not absolute is ignored.
    if os.path.isabs(base):
        return Path(base) / DISTRIBUTION
    home = os.path.expanduser("~")  # "~" itself where neither HOME nor the user's entry is there
    has_home = os.path.isabs(home) and os.environ.get("HOME") != ""
    return Path(home) / ".cache" / DISTRIBUTION if has_home else None


def our_version() -> str:
    """Of this distribution; "unknown" in a checkout that is not installed."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"


def cache_path(kind: str, *content: object, folder: Path | None = None) -> Path | None:
    """Return the cache file of a document that follows from `content` (JSON values) alone; None
    where nothing is kept.

    Args:
        folder: None is the user's cache folder.
    """
    folder = folder or cache_folder()
    return folder and folder / f"{kind}-{fingerprint(*content)}.json"


def fingerprint(*content: object) -> str:
    """A short hash of JSON values."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return digest[:24]


def every(
    kind: str, document: type[DocumentT], *, folder: Path | None = None
) -> Iterator[DocumentT]:
    """All documents of this kind, in no order. What cannot be used is noted and left."""
    folder = folder or cache_folder()
    for path in _files(kind, folder):
        content = _load(path, document, "is not used")
        if content is not None:
            yield content


def has_any(kind: str) -> bool:
    """True if the user's cache folder holds a document of this kind."""
    return bool(_files(kind, cache_folder()))


def recall(path: Path | None, document: type[DocumentT]) -> DocumentT | None:
    """Load a cached document; None if there is none that can be used."""
    if path is None or not _is_ours(path.parent) or not os.path.lexists(path):
        return None
    content = _load(path, document, "is not used and will be written anew")
    if content is not None:
        with suppress(OSError):
            os.utime(path)  # the oldest are removed first
    return content


def keep(path: Path | None, document: Document) -> None:
    """Write it for later runs, and remove the oldest of its kind; what cannot be done is noted."""
    if path is None:
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(path.parent):
            return
        document.save(path, is_private=True)
    except (OSError, ValueError) as error:
        _warn(path.parent, f"nothing is kept for the next run: {error}")
        return
    with suppress(OSError):  # another process may be removing them too
        files = _files(path.name.split("-")[0], path.parent)
        for old in sorted(files, key=lambda file: file.stat().st_mtime)[:-MOST_FILES]:
            old.unlink(missing_ok=True)


def _files(kind: str, folder: Path | None) -> list[Path]:
    """The files of a kind in a folder that nobody else can write to."""
    if folder is None or not _is_ours(folder):
        return []
    with suppress(OSError):
        return list(folder.glob(f"{kind}-*.json"))
    return []


def _is_ours(folder: Path) -> bool:
    """True for a folder of this user that others cannot write to; another one is noted."""
    try:
        problem = not_private(folder.stat())
    except FileNotFoundError:
        return False
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        _warn(folder, f"{folder} is not used, and nothing is kept there: {problem}")
    return not problem


def _load(path: Path, document: type[DocumentT], otherwise: str) -> DocumentT | None:
    try:
        return document.load(path, is_private=True)
    except AdvisorError as error:
        _warn(path.parent, f"{path} {otherwise}: {error.what}")
        return None


def _warn(folder: Path, text: str) -> None:
    """Log the first problem with a folder: a hundred files that are broken alike say no more."""
    if folder not in _warned:
        _warned.add(folder)
        log.warning("%s", text)
