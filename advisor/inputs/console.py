"""Console: stdout carries the answer, stderr progress and notes.

Under torchrun messages common to all ranks are printed once.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS = 80


def local_rank() -> int:
    """Local rank under torchrun; 0 without it."""
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text.isdecimal() else 0


def show_on_screen(renderable: RenderableType, *, no_color: bool) -> None:
    """Print to stdout: color on a terminal only, never wider than a page."""
    from rich.console import Console

    console = Console(no_color=no_color or None, highlight=False)
    console.width = min(console.width, COLUMNS)
    console.print(renderable, crop=False)


def writable(path: str | None) -> None:
    """Fail before the work, not after it, if an output file is not writable."""
    from profiles.record import require_writable

    if path is not None:
        require_writable(path)


def write(path: str, text: str) -> None:
    """Write a file atomically and report it."""
    from profiles.record import write_text

    write_text(path, text)
    say(f"wrote {path}")


def progress(text: str) -> None:
    """Print progress to a terminal; nothing to a pipe or a file."""
    if sys.stderr.isatty() and not local_rank():
        say(text)


def say(text: str) -> None:
    """Print a message to stderr; stdout is for the answer."""
    click.echo(text, err=True)
