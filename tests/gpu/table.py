"""The table: a row for each measured thing, and a line for each part."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from profiles.units import format_bandwidth, format_flop_rate, format_gib, format_seconds
from tests.gpu.results import CaseResult, Outcome, Results, Row, Unit
from tests.gpu.run import PARTS

WIDTHS = (60, 12, 12, 12, 6)
HEAD = ("", "data sheet", "bench", "measured", "ratio")
MIB_BELOW = 2**30


def table(results: Results) -> str:
    """All of it as text; ratios are measured over predicted, by the bench where there is one."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: Results) -> Iterator[str]:
    size = ", at small size to try the logic" if results.is_small else ""
    yield f"{results.device}, torch {results.torch}{size}"
    for part, title in PARTS.items():
        cases = results.of_part(part)
        if not cases:
            continue
        yield ""
        yield f"({part}) {title}"
        yield _row(HEAD)
        for case in cases:
            yield from _of_case(case)
        yield from _summary(part, cases)


def _of_case(case: CaseResult) -> Iterator[str]:
    if case.outcome in (Outcome.FAILED, Outcome.LEFT_OUT):
        first = case.text.splitlines()[0] if case.text else ""
        yield f"{case.name}: {case.outcome}: {first}"
    for row in case.rows:
        if row.unit is Unit.ERROR:
            words = (f"<= {row.limit:.0e}" if row.limit else "as it is", "", f"{row.measured:.1e}")
            mark = "!" if row.is_beyond else ""
            yield _row((f"{case.name}, {row.term}", *words, mark))
        else:
            numbers = (_shown(row, v) for v in (row.from_sheet, row.from_bench, row.measured))
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
            yield _row((f"{case.name}, {row.term}", *numbers, ratio))


def _row(words: tuple[str, ...]) -> str:
    first, *others = words
    cells = [word.rjust(width) for word, width in zip(others, WIDTHS[1:], strict=True)]
    return " ".join([first.ljust(WIDTHS[0]), *cells]).rstrip()


def _shown(row: Row, value: float | None) -> str:
    if value is None:
        return ""
    match row.unit:
        case Unit.SECONDS:
            return format_seconds(value)
        case Unit.BYTES:
            return format_gib(value) if value >= MIB_BELOW else f"{value / 2**20:.4g} MiB"
        case Unit.BYTES_PER_S:
            return format_bandwidth(value)
        case Unit.FLOP_PER_S:
            return format_flop_rate(value)
    return f"{value:.3g}"


def _summary(part: str, cases: tuple[CaseResult, ...]) -> Iterator[str]:
    outcomes = [case.outcome for case in cases]
    counts = [(str(o), outcomes.count(o)) for o in Outcome if o in outcomes]
    yield f"({part}) " + ", ".join(f"{count} {name}" for name, count in counts)
    rows = [row for case in cases for row in case.rows]
    bounded = [row for row in rows if row.limit]
    if bounded:
        worst = max(bounded, key=lambda row: row.measured / (row.limit or 1.0))
        beyond = sum(row.is_beyond for row in rows)
        yield (
            f"({part}) {beyond} of {sum(row.limit is not None for row in rows)} beyond their limit;"
            f" the nearest is {worst.measured:.1e} of {worst.limit:.0e}"
        )
    by_term: dict[str, list[float]] = {}
    for row in rows:
        if row.ratio is not None:
            term = row.term if part in "cde" else row.unit.value
            by_term.setdefault(term, []).append(row.ratio)
    for term, ratios in by_term.items():
        yield (
            f"({part}) {term}: measured over predicted {statistics.median(ratios):.2f} at the"
            f" median, {min(ratios):.2f} to {max(ratios):.2f}, of {len(ratios)}"
        )
