"""Content of files: regular ones only, up to a size, so that no path blocks or fills the memory."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from profiles.errors import FileError
from profiles.units import MIB

MOST_BYTES = 32 * MIB
"""Of a file that is read whole. The largest that people have, profiles of 450 layers and indexes of
100,000 tensors, take half of it at most."""
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: str | os.PathLike[str], *, is_private: bool = False) -> BinaryIO:
    """Open a regular file to read bytes. A FIFO is not waited for.

    Args:
        is_private: it has to be this user's own, and writable by nobody else.

    Raises:
        FileError: missing, not readable, something else than a file, or not private.
    """
    try:
        # Without O_NONBLOCK a FIFO is opened when somebody writes to it, which may be never.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise FileError(f"cannot read `{path}`: {error.strerror}") from None
    except ValueError:  # a NUL, or a character that the file system cannot write
        raise FileError(f"cannot read {str(path)!r}: no file is named so") from None
    try:
        problem = _problem(os.fstat(handle), is_private=is_private)
        if problem:
            raise FileError(f"cannot read `{path}`: {problem}")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _problem(status: os.stat_result, *, is_private: bool) -> str:
    """The reason not to read such a file; empty where there is none."""
    return not_a_file(status) or (not_private(status) if is_private else "")


def not_a_file(status: os.stat_result) -> str:
    """The reason why it is no regular file; empty where it is one."""
    if stat.S_ISDIR(status.st_mode):
        return "Is a directory"
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        return f"it is {kind}, a regular file is wanted"
    return ""


def not_private(status: os.stat_result) -> str:
    """The reason why others may have written a file or folder; empty where there is none."""
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, not to {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write it (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


_PART_BYTES = 2**20
"""Read at once: Python takes memory for as much as is asked for, however small the file is."""


def read_bytes(
    path: str | os.PathLike[str], *, most: int = MOST_BYTES, is_private: bool = False
) -> bytes:
    """The content of a regular file of at most `most` bytes.

    Raises:
        FileError: see `open_regular`; or the file is larger.
    """
    with open_regular(path, is_private=is_private) as file:
        content = bytearray()
        try:
            while part := file.read(min(_PART_BYTES, most + 1 - len(content))):
                content += part
        except OSError as error:
            raise FileError(f"cannot read `{path}`: {error.strerror}") from None
    if len(content) > most:
        raise FileError(f"cannot read `{path}`: it has more than {most:,} bytes, the most allowed")
    return bytes(content)


def read_text(
    path: str | os.PathLike[str],
    *,
    most: int = MOST_BYTES,
    encoding: str = "utf-8",
    is_private: bool = False,
) -> str:
    """The text of a regular file of at most `most` bytes; line ends become "\\n".

    Raises:
        FileError: see `read_bytes`; or it is not UTF-8.
    """
    content = read_bytes(Path(path), most=most, is_private=is_private)
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError:
        raise FileError(f"cannot read `{path}`: it is not UTF-8 text") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")
