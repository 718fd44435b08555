"""The constants of the memory prediction: few, physical, the same for every row.

What an allocator counts follows from closed forms without any; these say what the device holds
beyond that. Fitted on published runs by `python -m tests.scorecard.memory_fit`, which prints them.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConstants:
    """What published runs say of memory that no closed form does.

    Attributes:
        slack_share: what the allocator holds over the fullest moment.
        context_bytes: of runtime and libraries outside the allocator.
        group_bytes: buffers of one communicator; a rank has one for each axis that has a group.
        dense_low, dense_high, experts_low, experts_high: ends of the ranges over the predicted
            value, which hold nine of ten published ones of other files. Mixtures of experts are
            known worse: their routers fill ranks unevenly, their software is young.
    """

    slack_share: float = 0.228
    context_bytes: float = 1.68 * GIB
    group_bytes: float = 0.402 * GIB
    dense_low: float = 0.91
    dense_high: float = 1.08
    experts_low: float = 0.811
    experts_high: float = 1.1

    def range_of(self, *, experts: bool) -> tuple[float, float]:
        """Ends over the predicted value: of a mixture of experts, or of all other transformers."""
        if experts:
            return self.experts_low, self.experts_high
        return self.dense_low, self.dense_high


FITTED = MemoryConstants()
