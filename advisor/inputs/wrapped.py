"""Text for a screen: wrapped on a terminal, unwrapped in a pipe."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


class Wrapped:
    """`text` for `rich.print`.

    A terminal gets lines of its width, wrapped at spaces and indented as the line that they
    continue; a pipe gets whole lines, for `grep` and copying.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        for line in self._text.splitlines():
            for piece in _pieces(line, options.max_width) if console.is_terminal else [line]:
                yield Text(piece, no_wrap=True, overflow="ignore")


class ShownAsText:
    """A value whose `str` is what `rich.print` shows, as `Wrapped`."""

    __slots__ = ()

    def __rich__(self) -> Wrapped:
        return Wrapped(str(self))


def _pieces(line: str, width: int) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return wrap(
        line,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]
