"""The fitted constants of the time of transformers: few, physical, the same for every row.

Fitted on published runs by `python -m tests.scorecard.fit`, which prints this table's values; what
the runs at hand do not determine stays near a prior that is written there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What cannot be read off a data sheet.

    Attributes:
        sustained: share of the published best matmul rate that products sustain inside a step.
        limited: the same of boards that reach the limit of their power: H100 and later, T4.
        memory: share of the achievable memory bandwidth that elementwise kernels reach.
        scan_bytes: traffic of a state-space layer's kernels for an element of its width, forward.
        flash: rate of attention without kept scores on an A100, as a share of the matmul rate.
        unaligned: rate of products whose sizes are no multiples of 64, as a share of others'.
        expert: rate of grouped products of experts, as a share of others'.
        overlap: hidden part of exchanges that run beside computing, but for Megatron's buckets.
        inside, shared: rate of collectives in a step, as a share of their best: in a node or with a
            network card for each device, and where devices share cards.
        launch_s: of one kernel by the host of an H100, framework and library included.
    """

    sustained: float = 0.952
    limited: float = 0.806
    memory: float = 0.739
    scan_bytes: float = 114.0
    flash: float = 0.395
    unaligned: float = 0.661
    expert: float = 0.564
    overlap: float = 0.617
    inside: float = 0.647
    shared: float = 0.297
    launch_s: float = 5.19e-05


CONSTANTS = Constants()
