"""Cost of one microbatch on a pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass

from advisor.cost.compute.unit_times import Computing
from advisor.cost.load.loads import Loads
from advisor.cost.stages.stage_memory import StageMemory


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds and bytes of one microbatch on a stage.

    Attributes:
        host_s: of the pipeline's code, which `forward_s` and `backward_s` include; `split_s` is its
            further share of a split backward, which they do not.
        late_s: wait of a step's first forward for parameters that are gathered once a step.
        reduce_s: to reduce its gradients; `replicate_s` between replicas of the shards.
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
    host_s: float = 0.0
    split_s: float = 0.0
