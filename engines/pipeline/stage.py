"""A replayed segment as a stage of torch.distributed.pipelining: tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from engines.blocks.autocast import as_fp32, autocast
from engines.blocks.forward_state import ForwardState
from engines.data.loss_weight import silence, weighted
from engines.pipeline.recording import Recording
from engines.pipeline.replay import Replay
from engines.pipeline.segments import Segment
from profiles.capture.batch.call import Batch, LossFn, call_model, loss_of, with_gradient
from profiles.errors import ModelError
from profiles.model.flow import Terms
from profiles.torch_compat import is_fake
from profiles.torch_compat.pipelining import STAGE


@dataclass(slots=True)
class Round:
    """The microbatches in flight, the same on every stage.

    Attributes:
        weights: of each one's mean loss in the loss of the step.
        states: of each one that a stage of this rank has run; where there are several.
    """

    pieces: Sequence[Batch] = ()
    weights: Sequence[float] = ()
    states: dict[int, ForwardState] = field(default_factory=dict)

    def begin(self, pieces: Sequence[Batch] = (), weights: Sequence[float] = ()) -> None:
        self.pieces, self.weights = pieces, weights
        self.states.clear()

    def state_of(self, number: int, modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """A context of one stage of this rank for a microbatch, whose state counts once."""
        if number in self.states:
            return self.states[number].second()
        self.states[number] = ForwardState(modules)
        return self.states[number].first()


class Stage(nn.Module):
    """One segment of a model. Its parameters are looked up in the model: FSDP2 replaces the objects
    for forward and backward.

    torch's schedules cut the arguments of a step into microbatches by rows. Here they cut
    a list of numbers, (n,) int64, and the stage takes its whole microbatch from the `Round`: so a
    batch may contain anything, and every stage sees the model's own inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        replay: Replay,
        *,
        round: Round,
        loss_fn: LossFn | None,
        autocast_to: torch.dtype | None,
        repeated: Sequence[nn.Module] = (),
    ) -> None:
        """`repeated`: modules whose code every stage of this rank runs, if there are several."""
        super().__init__()
        object.__setattr__(self, "_repeated", repeated)
        self._replay = replay
        self._round = round
        self._loss_fn = loss_fn
        self._autocast_to = autocast_to
        object.__setattr__(self, "_model", model)  # its modules are not this one's

    def forward(self, *received: Tensor, microbatch: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Values to send on, or the loss of the last stage, (1,), as its share in the step's loss.

        Args:
            received: as `Segment.received`.
            microbatch: (1,), its number in the round.
        """
        number = int(microbatch)
        piece, has_target = self._round.pieces[number], self._loss_fn is not None
        model, repeated = self._model, self._repeated
        state = self._round.state_of(number, repeated) if repeated else nullcontext()
        with state, autocast(self._replay.device, self._autocast_to):
            output = self._replay.run(
                received, lambda: call_model(model, piece, has_target=has_target)
            )
        if not self.segment.is_last:
            assert isinstance(output, tuple)
            return output
        weight = self._round.weights[number]
        silence(output, weight)
        try:
            loss = loss_of(as_fp32(output, self._autocast_to), piece, self._loss_fn)
        except (AttributeError, LookupError, NameError, TypeError) as error:
            raise _out_of_reach(f"; or its code fails: {type(error).__name__}: {error}") from error
        if is_fake(loss):
            raise _out_of_reach()
        if torch.is_grad_enabled():
            loss = with_gradient(loss)
        # No view, which could not be detached after its backward (see `_own_loss`).
        return torch.stack([weighted(loss, weight)])

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return (self._model.get_parameter(name) for name in sorted(self.segment.parameters))

    @property
    def segment(self) -> Segment:
        return self._replay.segment

    if TYPE_CHECKING:
        _model: nn.Module
        _repeated: Sequence[nn.Module]


def _out_of_reach(otherwise: str = "") -> ModelError:
    return ModelError(
        "the loss uses a tensor of another stage, which is not here: a hook inside a unit saved it"
        f"{otherwise}",
        hints=["hook the unit itself, or let it return the tensor"],
    )


def pipeline_stage(
    stage: Stage,
    recording: Recording,
    *,
    device: torch.device,
    can_split: bool,
    group: dist.ProcessGroup | None,
) -> PipelineStage:
    """`stage` with the shapes of its inputs and outputs, so that torch need not infer them.

    A tensor with a gradient is marked so on both sides: else the sender's backward would get
    none. Unless `can_split`, the backward runs as one where a schedule would split it,
    and the second half has nothing left to do.
    """
    segment = stage.segment
    loss = torch.empty(1, device=device, requires_grad=True)
    return STAGE(
        stage,
        segment.index,
        segment.count,
        device,
        input_args=buffers(segment.received, recording, device),
        output_args=(loss,) if segment.is_last else buffers(segment.sent, recording, device),
        group=group,
        dw_builder=None if can_split else lambda: _nothing,
    )


def _nothing() -> None:
    """The weights' half of a backward that ran as one."""


def buffers(
    sums: Sequence[Terms], recording: Recording, device: torch.device
) -> tuple[Tensor, ...]:
    """Contiguous tensors without values, of the recorded shapes."""
    made = [recording.sum_of(terms) for terms in sums]
    return tuple(
        torch.empty(m.shape, dtype=m.dtype, device=device).requires_grad_(m.needs_gradient)
        for m in made
    )
