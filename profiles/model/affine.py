"""A quantity that grows with the microbatch."""

from __future__ import annotations

from profiles.record import Record


class Affine(Record):
    """A quantity that grows with the microbatch: `fixed + per_sample * samples`."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, samples: float) -> float:
        return self.fixed + self.per_sample * samples

    def __mul__(self, factor: float) -> Affine:
        return Affine(fixed=self.fixed * factor, per_sample=self.per_sample * factor)

    def __add__(self, other: Affine) -> Affine:
        return Affine(fixed=self.fixed + other.fixed, per_sample=self.per_sample + other.per_sample)
