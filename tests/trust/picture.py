"""The picture as SVG, written by hand: the same bytes for the same reports, whatever is installed.

predicted against measured    a dot a run, on log axes; the line is equality
ratios                        a row a case or peer; the line is 1
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

from tests.trust import marks
from tests.trust.claim import Files, errors, percent
from tests.trust.marks import Ratio
from tests.trust.runs import Pairs

WIDTH, SIDE, LEFT, TOP = 960, 330, 72, 40
"""Of the picture; of a square of dots; and what stands left of it and above."""
PANEL = WIDTH // 2
ROW, NAMES, BAR = 15, 200, 240
"""Height of a row of ratios, width of its name, width of its axis."""
NEAR = 1.25
"""The thin lines: a quarter more or less."""
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
"""Okabe and Ito's, which the colour-blind tell apart."""
LOST = "#d55e00"


@dataclass(frozen=True)
class Axis:
    """Values on a log scale.

    Attributes:
        low, high: at its ends.
        start, length: of it, in pixels; a negative length goes up.
    """

    low: float
    high: float
    start: float
    length: float

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + self.length * min(1.0, max(0.0, share))


def drawn(files: Files) -> str:
    """The whole picture."""
    below = TOP + SIDE + 90
    parts = [
        *_scatter(0, "Time of a step or a sum, s", marks.step_times(files), 1.0),
        *_scatter(PANEL, "Peak of tensors on a rank, MiB", marks.peaks(files), 2.0**20),
    ]
    chosen = "Chosen plan's time ÷ the best's (model, nodes x ranks, memory)"
    lines, height = _ratios(
        0, below, chosen, marks.regrets(files), "make regret", most_is_worse=True
    )
    parts += lines
    lines, other = _ratios(
        PANEL, below, "Our throughput ÷ theirs, equal losses", marks.throughputs(files),
        "make peers", most_is_worse=False,
    )  # fmt: skip
    parts += lines
    whole = below + max(height, other)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {whole}" width="{WIDTH}"'
        f' height="{whole}" font-family="sans-serif" font-size="11" fill="#222">'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{whole}" fill="#fff"/>', *parts]) + (
        "\n</svg>\n"
    )


def _scatter(x: int, title: str, kinds: dict[str, Pairs], unit: float) -> Iterator[str]:
    """A square of dots: predicted to the right, measured up."""
    left, bottom = x + LEFT, TOP + SIDE
    yield _text(left, TOP - 16, f"{title}: predicted against measured", size=13)
    values = [value / unit for pairs in kinds.values() for pair in pairs for value in pair]
    if not values:
        yield _text(left + 12, TOP + 18, "not measured yet: make regret, make peers")
        return
    yield _box(left, TOP, SIDE, SIDE)
    low, high = min(values) / 1.3, max(values) * 1.3
    across, up = Axis(low, high, left, SIDE), Axis(low, high, bottom, -SIDE)
    for tick in _ticks(low, high):
        yield _line(across(tick), TOP, across(tick), bottom, "#eee")
        yield _line(left, up(tick), left + SIDE, up(tick), "#eee")
        yield _text(across(tick), bottom + 14, f"{tick:g}", anchor="middle")
        yield _text(left - 6, up(tick) + 4, f"{tick:g}", anchor="end")
    yield _line(left, bottom, left + SIDE, TOP, "#222")
    for factor in (NEAR, 1 / NEAR):
        first, last = max(low, low / factor), min(high, high / factor)
        yield _line(across(first), up(first * factor), across(last), up(last * factor), "#bbb")
    words = "predicted (thin lines: a quarter off; figures: runs, median error)"
    yield _text(left + SIDE / 2, bottom + 30, words, anchor="middle")
    middle = TOP + SIDE / 2
    yield (
        f'<text transform="translate({x + 24} {middle:.0f}) rotate(-90)"'
        ' text-anchor="middle">measured</text>'
    )
    for place, (name, pairs) in enumerate(kinds.items()):
        dots = [(across(said / unit), up(real / unit)) for said, real in pairs]
        yield _dots(dots, COLOURS[place])
        y = TOP + 18 + 15 * place
        yield _dots([(left + 12, y - 4)], COLOURS[place])
        error = percent(median(errors(pairs)))
        yield _text(left + 20, y, f"{name}: {len(pairs)}, {error} off", halo=True)


def _ratios(
    x: int, y: int, title: str, ratios: Sequence[Ratio], command: str, *, most_is_worse: bool
) -> tuple[list[str], int]:
    """Rows of ratios, and their height; what is on the wrong side of 1 is named by its colour."""
    left = x + NAMES
    lines = [_text(x + 24, y - 14, title, size=13)]
    rows = list(dict.fromkeys(ratio.row for ratio in ratios))
    if not rows:
        return [*lines, _text(x + 24, y + 6, f"not measured yet: {command}")], 2 * ROW
    ends = [
        end
        for ratio in ratios
        for end in (ratio.value * (1 + ratio.noise), ratio.value / (1 + ratio.noise))
        if math.isfinite(end)
    ]
    low, high = min(0.9, *ends) / 1.02, max(1.1, *ends) * 1.02
    axis, bottom = Axis(low, high, left, BAR), y + ROW * len(rows)
    for tick in _ratio_ticks(low, high):
        lines.append(_line(axis(tick), y, axis(tick), bottom, "#eee" if tick != 1 else "#222"))
        lines.append(_text(axis(tick), bottom + 14, f"{tick:g}", anchor="middle"))
    kinds = list(dict.fromkeys(ratio.kind for ratio in ratios))
    for place, row in enumerate(rows):
        middle = y + ROW * place + ROW / 2
        lines.append(_text(left - 8, middle + 4, row, anchor="end"))
        for ratio in ratios:
            if ratio.row != row:
                continue
            if not math.isfinite(ratio.value):
                lines.append(_text(left + BAR, middle + 4, "FAILED", anchor="end", colour=LOST))
                continue
            if ratio.noise:
                ends_at = (axis(ratio.value * f) for f in (1 / (1 + ratio.noise), 1 + ratio.noise))
                first, last = ends_at
                lines.append(_line(first, middle, last, middle, "#bbb", width=3))
            is_lost = ratio.value / (1 + ratio.noise) > 1 if most_is_worse else False
            colour = LOST if is_lost else COLOURS[kinds.index(ratio.kind) % len(COLOURS)]
            lines.append(_dots([(axis(ratio.value), middle)], colour))
    notes = (
        ["grey: what two runs of one plan differ by; red: beyond it"]
        if most_is_worse
        else ["left of 1 we are slower", *kinds]
    )
    at = left - 60.0 if most_is_worse else x + 24.0
    for place, note in enumerate(notes):
        if place:
            lines.append(_dots([(at, bottom + 30)], COLOURS[place - 1]))
        lines.append(_text(at + 8, bottom + 34, note))
        at += 24 + 6.2 * len(note)
    return lines, ROW * len(rows) + 48


def _ticks(low: float, high: float) -> Iterator[float]:
    """Powers of ten; threes too where there are few."""
    steps = (1, 3) if high / low < 1000 else (1,)
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        for step in steps:
            tick = float(f"{step}e{power}")
            if low <= tick <= high:
                yield tick


def _ratio_ticks(low: float, high: float) -> list[float]:
    ticks = (0.1, 0.25, 0.5, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 5, 10, 20, 50)
    wide = high / low > 4
    return [t for t in ticks if low <= t <= high and not (wide and t in (0.8, 0.9, 1.1, 1.25, 1.5))]


def _dots(places: Sequence[tuple[float, float]], colour: str) -> str:
    """Lines without length that end round: a tenth of the bytes of circles."""
    path = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places)
    return (
        f'<path d="{path}" stroke="{colour}" stroke-width="6" stroke-linecap="round"'
        ' stroke-opacity=".6"/>'
    )


def _line(x: float, y: float, to_x: float, to_y: float, colour: str, *, width: int = 1) -> str:
    return (
        f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" stroke="{colour}"'
        f' stroke-width="{width}"/>'
    )


def _box(x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" fill="none"'
        ' stroke="#bbb"/>'
    )


def _text(
    x: float, y: float, words: str, *, anchor: str = "start", size: int = 11, colour: str = "#222",
    halo: bool = False,
) -> str:  # fmt: skip
    under = ' stroke="#fff" stroke-width="3" paint-order="stroke"' if halo else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
        f' fill="{colour}"{under}>{escape(words)}</text>'
    )
