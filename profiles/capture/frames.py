"""Locates the line of the user's own code that raised an error."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path


def user_line(error: BaseException) -> str | None:
    """file:line of the innermost frame that is the user's own, or of the syntax error."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{shown_path(error.filename)}:{error.lineno}"
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if _is_user(frame.filename)
    ]
    return f"{shown_path(frames[-1].filename)}:{frames[-1].lineno}" if frames else None


def summary(error: BaseException) -> str:
    """An exception's class and the first line of what it says; two where that ends in a colon.

    >>> summary(KeyError("width"))
    "KeyError: 'width'"
    """
    first, *more = str(error).strip().splitlines() or [""]
    if first.endswith(":") and more:
        first = f"{first} {more[0].strip()}"
    kind = type(error).__name__
    return f"{kind}: {first}" if first else kind


def shown_path(path: str | None) -> str | None:
    """A path relative to the current folder where it lies in it."""
    if path is None:
        return None
    here = Path.cwd()
    full = Path(path).absolute()
    return str(full.relative_to(here) if full.is_relative_to(here) else full)


def _is_user(filename: str) -> bool:
    """Neither Python's library, nor an installed package, nor this project."""
    ours = Path(__file__).resolve().parents[2]
    libraries = [Path(sysconfig.get_path(key)) for key in ("stdlib", "purelib", "platlib")]
    owned = [*libraries, *(ours / package for package in ("advisor", "engines", "profiles"))]
    path = Path(filename)
    return path.is_absolute() and not any(path.is_relative_to(folder) for folder in owned)
