"""Locates the line of the user's own code that raised an error."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path


def user_line(error: BaseException) -> str | None:
    """file:line of the innermost frame that is the user's own, or of the syntax error."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{shown_path(error.filename)}:{error.lineno}"
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if _is_user(frame.filename)
    ]
    return f"{shown_path(frames[-1].filename)}:{frames[-1].lineno}" if frames else None


def model_line(error: BaseException | None = None) -> str:
    """file:line of the model's code in the traceback of `error` or, without one, in the calls that
    are going on: the user's innermost, else a library's module's; empty if there is none."""
    trace = traceback.walk_tb(error.__traceback__) if error is not None else None
    # From the caller's: with its own frame the list would be a cycle, in which tensors live on.
    frames = list(trace or reversed(list(traceback.walk_stack(sys._getframe(1)))))
    callers = [n for n, (frame, _) in enumerate(frames) if frame.f_code.co_filename == _CALLER]
    frames = frames[callers[-1] if callers else 0 :]
    code = [(f, line) for f, line in frames if _is_model(f.f_code.co_filename)]
    chosen = [(f, line) for f, line in code if _is_user(f.f_code.co_filename)]
    if not chosen:
        # Last: before Python 3.13 to read the locals of a frame keeps them alive until it ends.
        modules = [(f, n) for f, n in code if hasattr(type(f.f_locals.get("self")), "forward")]
        chosen = modules or code
    if not chosen:
        return ""
    frame, line = chosen[-1]
    return f"{shown_path(frame.f_code.co_filename)}:{line}"


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


_ROOT = Path(__file__).resolve().parents[2]
_OURS = [_ROOT / package for package in ("advisor", "engines", "profiles")]
_PACKAGES = [Path(sysconfig.get_path(key)) for key in ("purelib", "platlib")]
_NO_MODELS = [folder / name for folder in _PACKAGES for name in ("torch", "numpy")]
_CALLER = str(_ROOT / "profiles" / "capture" / "batch" / "call.py")  # which calls models and losses
_PYTHON = Path(sysconfig.get_path("stdlib"))


def _is_user(filename: str) -> bool:
    """Neither Python's library, nor an installed package, nor this project."""
    return _is_outside(filename, [_PYTHON, *_PACKAGES, *_OURS])


def _is_model(filename: str) -> bool:
    """Neither Python's library, nor torch or NumPy, nor this project."""
    path = Path(filename)
    is_package = any(path.is_relative_to(folder) for folder in _PACKAGES)
    return _is_outside(filename, [*_NO_MODELS, *_OURS, *([] if is_package else [_PYTHON])])


def _is_outside(filename: str, folders: Iterable[Path]) -> bool:
    path = Path(filename)
    return path.is_absolute() and not any(path.is_relative_to(folder) for folder in folders)
