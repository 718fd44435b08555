"""ReportView as text of at most 80 columns, in ASCII if the terminal has no more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from textwrap import wrap
from typing import TYPE_CHECKING

from advisor.report.view import BreakdownItem, ReportView

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

WIDTH = 80
# Below this width the reasons of the table go under their plans and the bar is omitted.
_NARROW = 72
# Minimum width; a narrower terminal wraps.
_LEAST = 40
_BAR = 20
_LABEL = 12  # "  plan      "
_TITLE, _STEP, _MEMORY = 30, 9, 11
_SOURCE = 18


@dataclass(frozen=True, slots=True)
class StyledLine:
    """A line of text and its style; color never carries meaning alone."""

    text: str
    style: str = ""


class Report:
    """Report for `rich.print`: color on terminals, block characters if the encoding has them."""

    def __init__(self, view: ReportView) -> None:
        self._view = view

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        width = max(_LEAST, min(WIDTH, options.max_width))
        for line in lines(self._view, blocks=not options.ascii_only, width=width):
            content = line.text
            if options.ascii_only:
                content = content.encode("ascii", "replace").decode()
            yield Text(content, style=line.style)


def text(view: ReportView) -> str:
    """Format the report as plain text, with an ASCII bar."""
    return "\n".join(line.text for line in lines(view, blocks=False))


def lines(view: ReportView, *, blocks: bool, width: int = WIDTH) -> Iterator[StyledLine]:
    """Format the report line by line, at most `width` columns wide; `blocks` for block
    characters."""
    memory = view.memory
    if width >= _NARROW:
        memory += f"  {_bar(view.memory_share, blocks)}"
    yield from _heading(view, width)
    yield StyledLine("")
    yield from _labelled("plan", (_sides(view.plan[0], view.devices, width), *view.plan[1:]), width)
    yield from _labelled("step", (f"{view.step}    {view.rate}",), width)
    yield from _labelled("memory", (memory, *view.main_memory), width)
    yield from _labelled("batch", view.batch, width)
    yield from _section("why", width)
    for number, reason in enumerate(view.reasons, start=1):
        yield from _hanging(f"  {number}. ", reason, width)
    if view.dissent:
        yield from _hanging("  but: ", view.dissent, width, style="yellow")
    yield from _section(view.memory_title, width)
    yield from _parts(view.memory_parts, width)
    if view.memory_note:
        yield from _hanging("  ", view.memory_note, width)
    yield from _section(view.time_title, width)
    yield from _parts(view.time_parts, width)
    yield from _others(view, width)
    yield from _basis(view, width)
    yield StyledLine("")
    for note in view.notes:
        yield from _hanging("note: ", note, width)
    for hint in view.hints:
        yield from _hanging("hint: ", hint, width)
    yield from _hanging("next: ", view.next_command, width, style="green")


def _heading(view: ReportView, width: int) -> Iterator[StyledLine]:
    name = f"advise: {view.title}"
    room = width - len(view.verdict) - 2
    first, *rest = _wrapped(name, room)
    yield StyledLine(f"{first}{view.verdict:>{width - len(first)}}", "bold")
    for more in rest:
        yield StyledLine(more, "bold")


def _section(title: str, width: int) -> Iterator[StyledLine]:
    yield StyledLine("")
    for line in _wrapped(title, width):
        yield StyledLine(line, "bold")


def _sides(left: str, right: str, width: int) -> str:
    room = width - _LABEL
    if len(left) + len(right) + 2 > room:
        return f"{left}  {right}"
    return f"{left}{right:>{room - len(left)}}"


def _labelled(label: str, texts: Iterable[str], width: int) -> Iterator[StyledLine]:
    head = f"  {label}".ljust(_LABEL)
    for content in texts:
        # Text that fits keeps its columns; only longer text is wrapped.
        short = len(head) + len(content) <= width
        for part in [content] if short else _wrapped(content, width - _LABEL):
            yield StyledLine(f"{head}{part}")
            head = " " * _LABEL


def _hanging(head: str, content: str, width: int, *, style: str = "") -> Iterator[StyledLine]:
    for line in _wrapped(content, width - len(head)):
        yield StyledLine(f"{head}{line}", style)
        head = " " * len(head)


def _wrapped(content: str, width: int) -> list[str]:
    """Wrap at spaces; cut words wider than a line, and do not break at hyphens (ZeRO-1)."""
    return wrap(content, width, break_on_hyphens=False) or [""]


def _bar(share: float, blocks: bool) -> str:
    full, empty = ("█", "░") if blocks else ("#", "-")
    filled = min(_BAR, round(share * _BAR))
    return f"{full * filled}{empty * (_BAR - filled)} {share:.0%}"


def _parts(parts: Iterable[BreakdownItem], width: int) -> Iterator[StyledLine]:
    """Fill each line with as many "name value" pairs as fit."""
    line = " "
    for part in parts:
        piece = f" {part.name} {part.value} "
        if line.strip() and len(line) + len(piece.rstrip()) > width:
            yield StyledLine(line.rstrip())
            line = " "
        line += piece
    yield StyledLine(line.rstrip())


def _columns(
    cells: Iterable[tuple[str, int]], last: str, width: int, *, style: str = ""
) -> Iterator[StyledLine]:
    """Cells of fixed widths, then a last one with the remaining width; long cells wrap in place.

    Line breaks in a cell are preserved.
    """
    stacks = [(_stack(cell, size - 1), size) for cell, size in cells]
    room = width - 2 - sum(size for _, size in stacks)
    stacks.append((_stack(last, room), room))
    for row in zip_longest(*(stack for stack, _ in stacks), fillvalue=""):
        padded = (cell.ljust(size) for cell, (_, size) in zip(row, stacks, strict=True))
        yield StyledLine(f"  {''.join(padded)}".rstrip(), style)


def _stack(cell: str, width: int) -> list[str]:
    return [line for part in cell.split("\n") for line in _wrapped(part, width)]


def _others(view: ReportView, width: int) -> Iterator[StyledLine]:
    yield StyledLine("")
    below = width < _NARROW
    title_width = width - 2 - _STEP - _MEMORY if below else _TITLE
    if view.others:
        head = ("other plans (mb = microbatch)", "step", "memory", "why not")
        yield from _row(head, title_width, width, below=below, style="bold")
        for row in view.others:
            cells = (f"{row.title}\n  {row.cut}", row.step, row.memory, row.why)
            yield from _row(cells, title_width, width, below=below)
    for content in filter(None, (view.ties, view.not_weighed, view.weighed)):
        yield from _hanging("  ", content, width)


def _row(
    row: tuple[str, str, str, str], title_width: int, width: int, *, below: bool, style: str = ""
) -> Iterator[StyledLine]:
    title, step, memory, why = row
    cells = [(title, title_width), (step, _STEP)]
    if below:
        yield from _columns(cells, memory, width, style=style)
        yield from _hanging("      ", why, width, style=style)
    else:
        yield from _columns([*cells, (memory, _MEMORY)], why, width, style=style)


def _basis(view: ReportView, width: int) -> Iterator[StyledLine]:
    yield StyledLine("")
    room = width - 2 - _SOURCE
    yield from _columns([("rests on", room)], "source", width, style="bold")
    for basis in view.basis:
        yield from _columns([(basis.what, room)], basis.source, width)
