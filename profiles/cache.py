"""Documents that are kept between runs, in the user's cache folder: few, and never relied on."""

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

from profiles.errors import AdvisorError, FileError
from profiles.record import Document

log = logging.getLogger(__name__)

DISTRIBUTION = "parallel-advisor"
# A file is some KiB: a hundred are a megabyte, and more models than one person works on.
MOST_FILES = 100

DocumentT = TypeVar("DocumentT", bound=Document)


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/parallel-advisor, else ~/.cache/parallel-advisor."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification: a path that is not absolute is ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / DISTRIBUTION


def our_version() -> str:
    """Of this distribution; "unknown" in a checkout that is not installed."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"


def cache_path(kind: str, *content: object, folder: Path | None = None) -> Path:
    """Return the cache file of a document that follows from `content` (JSON values) alone.

    Args:
        folder: None is the user's cache folder.
    """
    return (folder or cache_folder()) / f"{kind}-{fingerprint(*content)}.json"


def fingerprint(*content: object) -> str:
    """A short hash of JSON values."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return digest[:24]


def every(
    kind: str, document: type[DocumentT], *, folder: Path | None = None
) -> Iterator[DocumentT]:
    """All documents of this kind, in no order. What cannot be read is noted and left."""
    for path in (folder or cache_folder()).glob(f"{kind}-*.json"):
        try:
            yield document.load(path)
        except AdvisorError as error:
            log.warning("%s is not used: %s", path, error.what)


def has_any(kind: str) -> bool:
    """True if the user's cache folder holds a document of this kind."""
    return any(cache_folder().glob(f"{kind}-*.json"))


def recall(path: Path, document: type[DocumentT]) -> DocumentT | None:
    """Load a cached document; None if there is none. An unreadable file is logged and left."""
    if not path.is_file():
        return None
    try:
        content = document.load(path)
    except AdvisorError as error:
        log.warning("%s is not used and will be written anew: %s", path, error.what)
        return None
    with suppress(OSError):
        path.touch()  # the oldest are removed first
    return content


def keep(path: Path, document: Document) -> None:
    """Write it for later runs, and remove the oldest of its kind; what cannot be done is noted."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        document.save(path)
        kind = path.name.split("-")[0]
        files = sorted(path.parent.glob(f"{kind}-*.json"), key=lambda file: file.stat().st_mtime)
        for old in files[:-MOST_FILES]:
            old.unlink(missing_ok=True)
    except (OSError, FileError) as error:
        log.warning("nothing is kept for the next run: %s", error)
