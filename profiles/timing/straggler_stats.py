"""Differences between the ranks' own times of a step, as measured and as kept of a run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from profiles.record import Record

EVEN = 0.1
"""Ranks that differ by less are called even; assumed: kernels and clocks vary by some percent."""


class Pace(Record):
    """Over the computing time of a rank that nothing slows.

    Attributes:
        scatter: the standard deviation of a rank's own time from step to step.
        straggling: what the slowest rank takes longer than the others in every step.
        slowest: that rank; None where it was another from run to run.
        runs: that this is of.
    """

    scatter: NonNegativeFloat
    straggling: NonNegativeFloat
    slowest: NonNegativeInt | None = None
    runs: PositiveInt = 1

    @property
    def known(self) -> Pace:
        """The difference in excess of that between ranks that count as even."""
        scatter, straggling = (
            value if value >= EVEN else 0.0 for value in (self.scatter, self.straggling)
        )
        return self.model_copy(
            update={
                "scatter": scatter,
                "straggling": straggling,
                "slowest": self.slowest if straggling else None,
            }
        )


def usual(paces: Sequence[Pace]) -> Pace:
    """Of several runs: medians, so that one run beside somebody else's work does not count."""
    known = [pace.known for pace in paces]
    slowest = {pace.slowest for pace in known}
    return Pace(
        scatter=statistics.median(pace.scatter for pace in known),
        straggling=statistics.median(pace.straggling for pace in known),
        slowest=slowest.pop() if len(slowest) == 1 else None,
        runs=len(known),
    )
