"""ReportView in a terminal: at most 80 columns, plain ASCII where that is all there is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from textwrap import wrap
from typing import TYPE_CHECKING

from advisor.report.view import Part, ReportView

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

WIDTH = 80
_BAR = 20
_LABEL = 12  # "  plan      "
_TITLE, _STEP, _MEMORY = 30, 9, 11
_SOURCE = 18


@dataclass(frozen=True, slots=True)
class Line:
    """One line and its role; meaning is never in the colour alone."""

    text: str
    style: str = ""


class Report:
    """A report for `rich.print`: colours on terminals, blocks where the encoding has them."""

    def __init__(self, view: ReportView) -> None:
        self._view = view

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        for line in lines(self._view, blocks=not options.ascii_only):
            said = line.text
            if options.ascii_only:
                said = said.encode("ascii", "replace").decode()
            yield Text(said, style=line.style)


def text(view: ReportView) -> str:
    """The report as plain text; the bar is ASCII, so that it goes anywhere."""
    return "\n".join(line.text for line in lines(view, blocks=False))


def lines(view: ReportView, *, blocks: bool) -> Iterator[Line]:
    """The report, line by line."""
    yield from _heading(view)
    yield Line("")
    yield from _labelled("plan", (_sides(view.plan[0], view.devices), *view.plan[1:]))
    yield from _labelled("step", (f"{view.step}    {view.rate}",))
    yield from _labelled("memory", (f"{view.memory}  {_bar(view.memory_share, blocks)}",))
    yield from _section("why")
    for number, reason in enumerate(view.reasons, start=1):
        yield from _hanging(f"  {number}. ", reason)
    if view.dissent:
        yield from _hanging("  but: ", view.dissent, style="yellow")
    yield from _section(view.memory_title)
    yield from _parts(view.memory_parts)
    yield from _section(view.time_title)
    yield from _parts(view.time_parts)
    yield from _others(view)
    yield from _basis(view)
    yield Line("")
    for hint in view.hints:
        yield from _hanging("hint: ", hint)
    yield from _hanging("next: ", view.next_command, style="green")


def _heading(view: ReportView) -> Iterator[Line]:
    name = f"advise: {view.title}"
    room = WIDTH - len(view.verdict) - 2
    first, *rest = wrap(name, room) or [""]
    yield Line(f"{first}{view.verdict:>{WIDTH - len(first)}}", "bold")
    for more in rest:
        yield Line(more, "bold")


def _section(title: str) -> Iterator[Line]:
    yield Line("")
    for line in wrap(title, WIDTH):
        yield Line(line, "bold")


def _sides(left: str, right: str) -> str:
    room = WIDTH - _LABEL
    if len(left) + len(right) + 2 > room:
        return f"{left}  {right}"
    return f"{left}{right:>{room - len(left)}}"


def _labelled(label: str, texts: Iterable[str]) -> Iterator[Line]:
    head = f"  {label}".ljust(_LABEL)
    for said in texts:
        # What fits keeps its columns; only what does not is wrapped.
        short = len(head) + len(said) <= WIDTH
        for part in [said] if short else wrap(said, WIDTH - _LABEL):
            yield Line(f"{head}{part}")
            head = " " * _LABEL


def _hanging(head: str, said: str, *, style: str = "") -> Iterator[Line]:
    indent = " " * len(head)
    for line in wrap(said, WIDTH, initial_indent=head, subsequent_indent=indent):
        yield Line(line, style)


def _bar(share: float, blocks: bool) -> str:
    full, empty = ("█", "░") if blocks else ("#", "-")
    filled = min(_BAR, round(share * _BAR))
    return f"{full * filled}{empty * (_BAR - filled)} {share:.0%}"


def _parts(parts: Iterable[Part]) -> Iterator[Line]:
    """ "name value" pieces, as many to a line as fit."""
    line = " "
    for part in parts:
        piece = f" {part.name} {part.value} "
        if len(line) + len(piece.rstrip()) > WIDTH:
            yield Line(line.rstrip())
            line = " "
        line += piece
    yield Line(line.rstrip())


def _columns(cells: Iterable[tuple[str, int]], last: str, *, style: str = "") -> Iterator[Line]:
    """Cells of given widths, then a last one with the rest; long ones are wrapped in place."""
    stacks = [(wrap(cell, width - 1) or [""], width) for cell, width in cells]
    room = WIDTH - 2 - sum(width for _, width in stacks)
    stacks.append((wrap(last, room) or [""], room))
    for row in zip_longest(*(stack for stack, _ in stacks), fillvalue=""):
        padded = (cell.ljust(width) for cell, (_, width) in zip(row, stacks, strict=True))
        yield Line(f"  {''.join(padded)}".rstrip(), style)


def _others(view: ReportView) -> Iterator[Line]:
    yield Line("")
    if view.others:
        yield from _columns(
            [("other plans", _TITLE), ("step", _STEP), ("memory", _MEMORY)], "why not", style="bold"
        )
        for row in view.others:
            cells = [(row.title, _TITLE), (row.step, _STEP), (row.memory, _MEMORY)]
            yield from _columns(cells, row.why)
    for said in filter(None, (view.not_built, view.weighed)):
        yield from _hanging("  ", said)


def _basis(view: ReportView) -> Iterator[Line]:
    yield Line("")
    room = WIDTH - 2 - _SOURCE
    yield from _columns([("rests on", room)], "source", style="bold")
    for basis in view.basis:
        yield from _columns([(basis.what, room)], basis.source)
