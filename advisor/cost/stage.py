"""A stage of a pipeline: what one microbatch takes on it."""

from __future__ import annotations

from dataclasses import dataclass

from advisor.cost.compute import Computing
from advisor.cost.loads import Loads
from advisor.cost.stage_memory import StageMemory


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage: seconds of one microbatch, and bytes.

    Attributes:
        late_s: what its first forward of a step waits for parameters that stay whole after it.
        reduce_s: to reduce its gradients, `replicate_s` between replicas of the shards.
    """

    part: Loads
    chunk: StageMemory
    computing: Computing
    forward_s: float
    backward_s: float
    late_s: float
    reduce_s: float
    replicate_s: float
    sent_s: float
