"""Growing the batch instead of decaying the learning rate: the same noise, in fewer steps.

Dividing the rate by five at an epoch and multiplying the batch by five there cool a training alike
(Smith, Kindermans, Ying and Le 2018, arXiv:1711.00489): the noise scale eps / (1 - m) (N / B - 1)
falls by the same factor. The larger batch takes fewer steps, and each has more for devices to do.
"""

from __future__ import annotations

from typing import NamedTuple, Self

from pydantic import PositiveFloat, PositiveInt, field_validator, model_validator

from profiles.errors import InputError
from profiles.record import Record


class EpochSettings(NamedTuple):
    """Settings of an epoch: samples per step, and learning rate."""

    batch: int
    learning_rate: float


class GrowingBatch(Record):
    """Schedule that steps by growing the batch up to its limit, then by decaying the rate.

    Make the plan for `largest`: a step with fewer rows is cut into the same number of smaller
    microbatches. Then, before each epoch, give the loader `batch` rows a step and the parameter
    groups `learning_rate`.

    Attributes:
        batch, learning_rate: of the first epochs.
        factor: by what the rate would be divided at each milestone.
        milestones: epochs, ascending.
        largest: samples per step that are not exceeded; a tenth of the training set in the paper.
        multiple: batches are rounded down to multiples of it (replicas times microbatches); the
            rate makes up for it.

    >>> schedule = GrowingBatch(
    ...     batch=128, learning_rate=0.1, factor=5, milestones=(60, 120, 160), largest=5000
    ... )
    >>> [schedule.at(epoch) for epoch in (0, 60, 120)]  # doctest: +NORMALIZE_WHITESPACE
    [EpochSettings(batch=128, learning_rate=0.1), EpochSettings(batch=640, learning_rate=0.1),
     EpochSettings(batch=3200, learning_rate=0.1)]
    >>> schedule.at(160)
    EpochSettings(batch=5000, learning_rate=0.03125)
    """

    batch: PositiveInt
    learning_rate: PositiveFloat
    factor: PositiveFloat
    milestones: tuple[float, ...]
    largest: PositiveInt
    multiple: PositiveInt = 1

    @field_validator("factor")
    @classmethod
    def _grows(cls, value: float) -> float:
        if value <= 1:
            raise InputError(f"the batch grows by a factor of more than 1, not {value:g}")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if list(self.milestones) != sorted(self.milestones):
            raise InputError(f"milestones ascend, these do not: {self.milestones}")
        if self.largest < self.batch:
            raise InputError(f"the first batch, {self.batch}, is larger than {self.largest}")
        if self.batch % self.multiple:
            raise InputError(f"the first batch, {self.batch}, is no multiple of {self.multiple}")
        return self

    def at(self, epoch: float) -> EpochSettings:
        """Batch and rate of `epoch`, counted from 0."""
        passed = sum(epoch >= milestone for milestone in self.milestones)
        cooled = self.factor**passed
        wanted = min(round(self.batch * cooled), self.largest)
        batch = wanted - wanted % self.multiple
        return EpochSettings(batch, self.learning_rate * (batch / self.batch) / cooled)

    def steps(self, *, samples: int, epochs: int) -> int:
        """Optimizer steps of `epochs` epochs over `samples` samples, short last ones included."""
        return sum(-(-samples // self.at(epoch).batch) for epoch in range(epochs))
