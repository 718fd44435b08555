"""Files written through a temporary one, so that an interrupted write loses nothing."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from profiles.errors import FileError
from profiles.record.reading import not_a_file


def write_text(path: str | os.PathLike[str], text: str, *, is_private: bool = False) -> None:
    """As `write_bytes`, in UTF-8."""
    write_bytes(path, text.encode(), is_private=is_private)


def write_bytes(path: str | os.PathLike[str], content: bytes, *, is_private: bool = False) -> None:
    """Write through a temporary file beside `path` and rename it into place; behind a link, beside
    the file that it names.

    Args:
        is_private: nobody else may read or write it (mode 0600).

    Raises:
        FileError: no space, no right, no such folder, or `path` is no regular file. What was there
            is untouched.
    """
    target = _regular(path)
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
        raise _unwritable(Path(path), error) from None


def require_writable(path: str | os.PathLike[str]) -> None:
    """Find out before long work, not after it, that `write_text` would be refused.

    Raises:
        FileError: no right, no such folder, or `path` is a folder or a device.
    """
    target = _regular(path)
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}."):
            pass
    except OSError as error:
        raise _unwritable(Path(path), error) from None


def _regular(path: str | os.PathLike[str]) -> Path:
    """The file that is replaced. A rename onto a device or a FIFO would put a file in its place,
    `/dev/null` of the whole machine included, and one onto a link would leave the file behind it.

    Raises:
        FileError: there is something else, or no file is named so.
    """
    try:
        target = Path(os.path.realpath(path))
        problem = not_a_file(target.stat())
    except FileNotFoundError:
        return target
    except OSError as error:
        raise _unwritable(Path(path), error) from None
    except ValueError:  # a NUL, or a character that the file system cannot write
        raise FileError(f"cannot write {str(path)!r}: no file is named so") from None
    if problem:
        raise _refused(Path(path), problem)
    return target


def _unwritable(path: Path, error: OSError) -> FileError:
    note = "; the old file is as it was" if os.path.isfile(path) else ""
    return _refused(path, f"{error.strerror}{note}")


def _refused(path: Path, problem: str) -> FileError:
    return FileError(f"cannot write `{path}`: {problem}", hints=["name another place with `-o`"])


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
