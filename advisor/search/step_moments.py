"""Bytes at every moment of a step, for rows that differ only in the degree of sharding."""

from __future__ import annotations

from dataclasses import dataclass

from advisor.search.space import Floats


@dataclass(frozen=True, slots=True)
class StepMoments:
    """Bytes at every moment of a step before the optimizer's.

    Attributes:
        fixed: on every rank, independent of the degree.
        sharded: of all ranks; each holds 1/degree.
        doubtful: activations and temporaries, among `fixed`.
        ahead: gathered early by a host that runs ahead, not counted in the moments.
        error: fraction by which a moment may be smaller.
    """

    fixed: Floats
    sharded: Floats
    doubtful: Floats
    ahead: float
    error: float = 0.0

    def beyond(self, before: StepMoments, samples: int, *, error: float) -> StepMoments:
        """Extrapolate by `samples` more, from the moments `before` of one sample less."""
        return StepMoments(
            fixed=(1 - error) * (self.fixed + samples * (self.fixed - before.fixed)),
            sharded=self.sharded,
            doubtful=(1 - error) * (self.doubtful + samples * (self.doubtful - before.doubtful)),
            ahead=self.ahead,
            error=2 * error,
        )
