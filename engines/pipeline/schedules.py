"""`Plan.schedule` as torch's schedule classes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from engines.plan import Schedule

AnySchedule = PipelineScheduleSingle | PipelineScheduleMulti

_ONE_STAGE: dict[Schedule, type[PipelineScheduleSingle]] = {
    Schedule.NAIVE: ScheduleGPipe,
    Schedule.GPIPE: ScheduleGPipe,
    Schedule.ONE_F_ONE_B: Schedule1F1B,
}
_SEVERAL_STAGES: dict[Schedule, type[PipelineScheduleMulti]] = {
    Schedule.INTERLEAVED: ScheduleInterleaved1F1B,
    Schedule.ZERO_BUBBLE: ScheduleInterleavedZeroBubble,
    Schedule.ZBV: ScheduleZBVZeroBubble,
}


def schedule_of(
    kind: Schedule, stages: Sequence[PipelineStage], *, microbatches: int
) -> AnySchedule:
    """The order of forwards and backwards over this rank's `stages`.

    The naive schedule, where the stages take turns, is GPipe with one microbatch. The stages weight
    their losses themselves, so torch scales nothing.
    """
    if kind in _ONE_STAGE:
        (stage,) = stages
        return _ONE_STAGE[kind](stage, microbatches, loss_fn=_own_loss, scale_grads=False)
    return _SEVERAL_STAGES[kind](list(stages), microbatches, loss_fn=_own_loss, scale_grads=False)


def _own_loss(output: Tensor, target: Tensor) -> Tensor:
    """The last stage's output is the loss; `target` is a number that torch requires.

    It is the same object: torch detaches an output after its backward, and keeps the losses of a
    round. A further node would hold what the stage received of every microbatch.
    """
    return output
