"""The report: a point for every size of every curve, whole processes, and the exponents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from profiles.record import Document, Record

REPORT = Path(__file__).parents[2] / "validation" / "growth.json"


class Point(Record):
    """One size, measured in a process of its own.

    Attributes:
        curve: whose point it is; of a whole process the model's name.
        at: the size; of a curve without sizes 1.
        cpu_s: seconds of the processor, of all processes that took part.
        seconds: by the clock.
        host_mib: of main memory beyond what was held when it began; of a whole process all of it.
        about: what came out.
        left_out: why there are no figures; else empty.
    """

    curve: str
    at: float
    cpu_s: float = 0.0
    seconds: float = 0.0
    host_mib: float = 0.0
    about: str = ""
    left_out: str = ""


class Report(Document):
    """All points, in the order of the curves, and the machine that the last of them is from."""

    measured_at: str
    machine: str
    torch: str
    points: tuple[Point, ...] = ()

    def of(self, curve: str) -> list[Point]:
        """The points of a curve, by size."""
        return sorted((p for p in self.points if p.curve == curve), key=lambda point: point.at)

    def knows(self, curve: str, at: float) -> bool:
        return any(point.curve == curve and point.at == at for point in self.points)


def exponent(points: Sequence[Point], amount: str) -> float | None:
    """The slope of log `amount` over log size, by least squares over the larger half of the sizes:
    what does not grow hides the growth of small ones. None of fewer than three points.

    >>> squares = [Point(curve="", at=n, cpu_s=3.0 * n**2) for n in (1, 10, 100, 1000)]
    >>> round(exponent(squares, "cpu_s"), 6)
    2.0
    """
    shown = [
        (math.log(point.at), math.log(value))
        for point in points
        if not point.left_out and (value := getattr(point, amount)) > 0
    ]
    if len(shown) < 3:
        return None
    shown = sorted(shown)[-max(3, (len(shown) + 1) // 2) :]
    mean_x, mean_y = (sum(values) / len(shown) for values in zip(*shown, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in shown)
    return sum((x - mean_x) * (y - mean_y) for x, y in shown) / spread
