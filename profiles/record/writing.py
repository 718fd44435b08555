"""Files written through a temporary one, so that an interrupted write loses nothing."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from profiles.errors import FileError


def write_text(path: str | os.PathLike[str], text: str, *, is_private: bool = False) -> None:
    """As `write_bytes`, in UTF-8."""
    write_bytes(path, text.encode(), is_private=is_private)


def write_bytes(path: str | os.PathLike[str], content: bytes, *, is_private: bool = False) -> None:
    """Write through a temporary file beside `path` and rename it into place.

    Args:
        is_private: nobody else may read or write it (mode 0600).

    Raises:
        FileError: no space, no right, no such folder. The old file is untouched.
    """
    target = Path(path)
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        if not is_private:  # mkstemp's mode is 0600
            os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except OSError as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        raise _unwritable(target, error) from None


def require_writable(path: str | os.PathLike[str]) -> None:
    """Find out before long work, not after it, that `write_text` would be refused.

    Raises:
        FileError: no right, no such folder, or `path` is a folder.
    """
    target = Path(path)
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}."):
            pass
    except OSError as error:
        raise _unwritable(target, error) from None


def _unwritable(target: Path, error: OSError) -> FileError:
    note = "; the old file is as it was" if target.is_file() else ""
    return FileError(
        f"cannot write `{target}`: {error.strerror}{note}", hints=["name another place with `-o`"]
    )


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
