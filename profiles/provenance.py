"""Sources of numbers, and the trust in them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from enum import StrEnum
from typing import Self

from pydantic import NonNegativeFloat, PositiveInt

from profiles.record import Record


class Source(StrEnum):
    """Origin of a number, most trusted first."""

    MEASURED = "measured"  # timed or counted on the machine that will run
    DERIVED = "derived"  # counted from the model, or computed from other facts
    DATASHEET = "datasheet"  # printed by the vendor, or published by somebody else
    ASSUMED = "assumed"  # nobody looked; a default with a reason
    USER = "you"  # given by the user


class Quantity(Record):
    """A number in base units with its source.

    `relative_error` is the half-width of the range as a fraction of the value: 0.15 means that the
    true value is believed to lie within +-15 %. `origin` cites the paper, page or command.
    """

    value: float
    source: Source
    relative_error: float = 0.0
    origin: str = ""

    @property
    def low(self) -> float:
        return self.value * (1 - self.relative_error)

    @property
    def high(self) -> float:
        return self.value * (1 + self.relative_error)


BENCH = "bench"
"""Origin of what a bench of kernels and collectives measured."""


class Timing(Record):
    """A time that was measured several times: median and spread, in seconds."""

    median_s: NonNegativeFloat
    low_s: NonNegativeFloat
    high_s: NonNegativeFloat
    repeats: PositiveInt

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Self:
        """The median, and the 10th to the 90th percentile, of one measurement or more."""
        ordered = sorted(seconds)
        tenth = len(ordered) // 10
        return cls(
            median_s=statistics.median(ordered),
            low_s=ordered[tenth],
            high_s=ordered[-1 - tenth],
            repeats=len(ordered),
        )

    @property
    def relative_error(self) -> float:
        """Half of the range, as a fraction of the median."""
        return (self.high_s - self.low_s) / (2 * self.median_s) if self.median_s else 0.0
