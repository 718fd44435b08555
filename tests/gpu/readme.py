"""Steps and ranks of a device as tables of markdown, and their place in the README of the tests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from profiles.units import format_gib, format_seconds
from tests.gpu.results import RESULTS, UNSEEN, CaseResult, Results, Row

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCK = re.compile(
    r"(<!-- gpu: written by tests/gpu/readme.py -->\n)(.*?)(<!-- end of gpu -->)", re.DOTALL
)


def tables(results: Results) -> str:
    """A row for each step, and for each rank."""
    lines = [f"Measured on one {results.device}, torch {results.torch}.", ""]
    lines += _table(
        ["one device", "step", "data sheet", "bench", "allocated", "predicted"],
        (_step(case) for case in results.of_part("c") if case.rows),
    )
    lines += _table(
        ["one rank of many", "peak", "predicted", "reserved", "predicted"],
        (_rank(case) for case in results.of_part("d") if case.rows),
    )
    return "\n".join(lines)


def unseen(results: Results) -> str:
    """Steps that were predicted before they ran, and their kernels by class."""
    lines = [
        f"Predicted before they ran on one {results.device}, on which nothing is calibrated; so are"
        " the first eight models.",
        "",
    ]
    lines += _table(
        ["one device", "step", "data sheet", "bench", "allocated", "predicted"],
        (_step(case) for case in results.of_part("c") if case.rows),
    )
    lines += _table(
        ["kernels of a step", "products", "bench", "attention", "bench", "the rest", "bench"],
        (_kernels(case) for case in results.of_part("f") if case.rows),
    )
    return "\n".join(lines)


def text() -> str:
    """All tables, of the files that are kept."""
    return tables(Results.load(RESULTS)) + "\n" + unseen(Results.load(UNSEEN))


def write(readme: Path = README) -> None:
    """Put the tables in their place."""
    shown = text()
    readme.write_text(BLOCK.sub(lambda match: match[1] + shown + match[3], readme.read_text()))


def _step(case: CaseResult) -> Iterator[str]:
    step, allocated = _of(case, "step"), _of(case, "allocated")
    yield case.name
    yield format_seconds(step.measured)
    yield _more(step.from_sheet, step.measured)
    yield _more(step.from_bench, step.measured)
    yield format_gib(allocated.measured)
    yield _more(allocated.from_sheet, allocated.measured)


def _rank(case: CaseResult) -> Iterator[str]:
    yield case.name
    for term in ("peak", "reserved"):
        row = _of(case, term)
        yield format_gib(row.measured)
        yield _more(row.from_sheet, row.measured)


def _kernels(case: CaseResult) -> Iterator[str]:
    yield case.name.removeprefix("kernels of a step, ")
    for term in ("products", "attention", "the rest"):
        rows = [row for row in case.rows if row.term == term]
        yield format_seconds(rows[0].measured) if rows else ""
        yield _more(rows[0].from_bench, rows[0].measured) if rows else ""


def _of(case: CaseResult, term: str) -> Row:
    return next(row for row in case.rows if row.term == term)


def _more(predicted: float | None, measured: float) -> str:
    """Error of a prediction, in percent of what was measured."""
    if predicted is None:
        return ""
    more = round(100 * (predicted / measured - 1))
    return f"{more:+d}%" if more else "0%"


def _table(head: list[str], rows: Iterable[Iterable[str]]) -> list[str]:
    widths = ["---", *("--:" for _ in head[1:])]
    return [*(f"| {' | '.join(cells)} |" for cells in (head, widths, *map(list, rows))), ""]
