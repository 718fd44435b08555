"""A claim: a question, the committed report that answers it, and where the answer falls short."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

VALIDATION = Path(__file__).parents[1] / "validation"


@dataclass(frozen=True)
class Files:
    """Committed reports; those of `tests/validation` may be taken from another folder."""

    folder: Path = VALIDATION

    def at(self, path: Path) -> Path:
        return self.folder / path.name if path.parent == VALIDATION else path

    def read(self, path: Path, load: Callable[[Path], Any]) -> Any:
        """The report of `path`; None if it was not measured yet."""
        place = self.at(path)
        return load(place) if place.exists() else None


@dataclass(frozen=True)
class Answer:
    """Figures of a report with units and ranges, and the cases that speak against us."""

    result: str
    short: str


@dataclass(frozen=True)
class Claim:
    """One line of the table.

    Attributes:
        command: that measures it anew.
        path, load: where its report is kept, and how it is read.
        answer: of the report; None if that part of it was not measured.
        lacking: what is said where there is no report.
    """

    question: str
    command: str
    path: Path
    load: Callable[[Path], Any]
    answer: Callable[[Any], Answer | None]
    lacking: str = "not measured yet"

    def of(self, files: Files) -> Answer:
        """The answer by what is committed."""
        report = files.read(self.path, self.load)
        answer = None if report is None else self.answer(report)
        return answer or Answer(f"{self.lacking}: `{self.command}`", "")


def percent(fraction: float) -> str:
    """Two digits, of what is below a thousandth too.

    >>> percent(0.00031), percent(0.0123), percent(0.456), percent(0.0)
    ('0.03%', '1.2%', '46%', '0%')
    """
    for least, digits in ((0.0995, 0), (0.000995, 1), (1e-12, 2)):
        if abs(fraction) >= least:
            return f"{fraction:.{digits}%}"
    return "0%"


def spread(values: Sequence[float], shown: Callable[[float], str]) -> str:
    """The median, and the least to the most.

    >>> spread([1.0, 2.0, 4.0], "{:.1f}x".format)
    '2.0x (1.0x to 4.0x)'
    """
    return f"{shown(median(values))} ({shown(min(values))} to {shown(max(values))})"


def errors(pairs: Iterable[tuple[float, float]]) -> list[float]:
    """|predicted / measured - 1| of (predicted, measured)."""
    return [abs(predicted / measured - 1) for predicted, measured in pairs]


def off(values: Sequence[float]) -> str:
    """Errors in words.

    >>> off([0.02, 0.3, 0.01])
    'off by 2.0% at the median, 30% at most'
    """
    text = f"off by {percent(median(values))} at the median, {percent(max(values))} at most"
    if len(values) >= 20:
        ninth = quantiles(values, n=10, method="inclusive")[-1]
        text = text.replace(" at most", f" at most, {percent(ninth)} in 9 of 10")
    return text


def listed(items: Sequence[str], *, most: int = 3, none: str = "none") -> str:
    """The first items, and how many more there are.

    >>> listed(["a", "b", "c"], most=2), listed([])
    ('a; b; 1 more', 'none')
    """
    rest = len(items) - most
    return "; ".join([*items[:most], *([f"{rest} more"] if rest > 0 else [])]) or none
