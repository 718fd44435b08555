"""Bytes at every moment of a step, for rows that differ in the degree of sharding alone."""

from __future__ import annotations

from dataclasses import dataclass

from advisor.search.space import Floats


@dataclass(frozen=True, slots=True)
class StepMoments:
    """Bytes at every moment of a step up to the optimizer's.

    Attributes:
        fixed: on every rank, whatever the degree.
        sharded: what ranks share, each 1/degree of it.
        doubtful: of `fixed`, activations and temporaries.
        ahead: what a host that runs ahead gathers besides.
        error: of a moment, how much less it may be than is said here, as a fraction.
    """

    fixed: Floats
    sharded: Floats
    doubtful: Floats
    ahead: float
    error: float = 0.0

    def beyond(self, before: StepMoments, samples: int, *, error: float) -> StepMoments:
        """Of `samples` more than these are of, which have one more than those `before`."""
        return StepMoments(
            fixed=(1 - error) * (self.fixed + samples * (self.fixed - before.fixed)),
            sharded=self.sharded,
            doubtful=(1 - error) * (self.doubtful + samples * (self.doubtful - before.doubtful)),
            ahead=self.ahead,
            error=2 * error,
        )
