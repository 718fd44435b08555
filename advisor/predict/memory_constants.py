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
        allocated_low, allocated_high, reserved_low, reserved_high: ends of the ranges over the
            predicted value, which hold nine of ten published ones of other files.
    """

    slack_share: float = 0.228
    context_bytes: float = 1.68 * GIB
    group_bytes: float = 0.402 * GIB
    allocated_low: float = 0.929
    allocated_high: float = 1.07
    reserved_low: float = 0.905
    reserved_high: float = 1.09


FITTED = MemoryConstants()
