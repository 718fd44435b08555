"""The constants of the memory prediction: few, physical, the same for every row."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConstants:
    """What published runs say of memory that no closed form does.

    Attributes:
        workspace_bytes: what libraries keep inside the allocator (matrix products' workspaces).
        kept_share: activations kept over those that the operations need on paper.
        transient_share: gradients in work while a layer runs its backward, over what it keeps.
        slack_share: what the allocator holds over the fullest moment.
        context_bytes: of runtime and libraries outside the allocator.
        group_bytes: buffers of one communicator; a rank has one for each axis that has a group.
        usable_share: of a device's memory; the rest is in pieces when a run fails.
        low, high: ends of the range over the predicted value, which hold nine of ten published
            ones of other sources.
    """

    workspace_bytes: float = 0.08 * GIB
    kept_share: float = 1.0
    transient_share: float = 0.5
    slack_share: float = 0.18
    context_bytes: float = 1.3 * GIB
    group_bytes: float = 0.4 * GIB
    usable_share: float = 0.88
    low: float = 0.85
    high: float = 1.2


FITTED = MemoryConstants()
