"""The matrix as a table of markdown, and its place in the README of the tests."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tests.matrix.architectures import ARCHITECTURES
from tests.matrix.plans import PLANS
from tests.matrix.results import Cell, Outcome, Results

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCK = re.compile(
    r"(<!-- matrix: written by tests/matrix/table.py -->\n)(.*?)(<!-- end of matrix -->)", re.DOTALL
)


def table(results: Results) -> str:
    """Rows and columns of what is known, what refused cells were refused for, and the worst error.

    A refused cell shows the number of its reason below the table; one that is not known is empty.
    """
    cells = results.by_place()
    refused = [cell for cell in results.cells if cell.outcome is Outcome.REFUSED]
    reasons = list(dict.fromkeys(_reason(cell) for cell in refused))
    lines = [_row(["", *PLANS]), _row(["---", *(":-:" for _ in PLANS)])]
    for row in ARCHITECTURES:
        actual = (cells.get((row, column)) for column in PLANS)
        lines.append(_row([row, *(_mark(cell, reasons) for cell in actual)]))
    lines += ["", *_reasons(refused, reasons), _summary(results)]
    return "\n".join(lines) + "\n"


def write_readme(results: Results, readme: Path = README) -> None:
    """Put the table in its place."""
    text = readme.read_text()
    readme.write_text(BLOCK.sub(lambda match: match[1] + table(results) + match[3], text))


def _row(words: Iterable[str]) -> str:
    return f"| {' | '.join(words)} |"


def _mark(cell: Cell | None, reasons: list[str]) -> str:
    if cell is None:
        return ""
    match cell.outcome:
        case Outcome.TRAINED:
            return "✓"
        case Outcome.REFUSED:
            return str(reasons.index(_reason(cell)) + 1)
        case _:
            return f"**{cell.outcome}**"


def _reason(cell: Cell) -> str:
    """Common part of the messages of one rule, without their numbers and names."""
    return f"{cell.rule}: {re.sub(r'`[^`]*`', '`…`', re.sub(r'[0-9]+', 'n', cell.text))}"


def _reasons(refused: list[Cell], reasons: list[str]) -> Iterable[str]:
    for number, reason in enumerate(reasons, 1):
        example = next(cell for cell in refused if _reason(cell) == reason)
        yield f"{number}. `{example.rule}`: {example.text}"
    if reasons:
        yield ""


def _summary(results: Results) -> str:
    trained = [cell for cell in results.cells if cell.outcome is Outcome.TRAINED]
    refused = sum(cell.outcome is Outcome.REFUSED for cell in results.cells)
    worst = max((max(c.loss_error or 0.0, c.gradient_error or 0.0) for c in trained), default=0.0)
    return (
        f"{len(trained)} of {len(results.cells)} train (✓) with a loss and gradients within"
        f" {worst:.0e} of one process, {refused} are refused before any work"
        f" (torch {results.torch}, transformers {results.transformers})."
    )
