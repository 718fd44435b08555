"""A model spread over the stages of a pipeline: one rank's share of every step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.failures import tell_others
from engines.pipeline.evaluation import forward_only
from engines.pipeline.holdings import buffer_owners, gathered, owners_of, release_others
from engines.pipeline.parts import parts_of, rank_of_stage, stages_of_rank
from engines.pipeline.recording import Recording, record
from engines.pipeline.replay import Replay
from engines.pipeline.schedules import AnySchedule, schedule_of
from engines.pipeline.split import can_split
from engines.pipeline.stage import Round, Stage, pipeline_stage
from engines.pipeline.tied import sum_gradients, ties_of
from engines.plan import Plan, Schedule
from profiles.batch import Batch, LossFn, batch_size, describe
from profiles.errors import BatchError
from profiles.flow import Flow

RECORDINGS_KEPT = 16
"""Batches of other shapes are recorded anew; a data set has a few lengths, not hundreds."""


class Pipeline:
    """The stages of this rank, and the exchange between the ranks. Made by all ranks together.

    Parameters that this rank's stages do not use are freed when it is made.

    Attributes:
        kept: first names of the parameters that this rank holds.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        flow: Flow,
        device: torch.device,
        timeout_s: float,
        loss_fn: LossFn | None,
    ) -> None:
        self._model = model
        self._plan = plan
        self._flow = flow
        self._device = device
        self._loss_fn = loss_fn
        self._rank = dist.get_rank()
        self._round = Round()
        self._recordings: dict[str, Recording] = {}
        self._ready: tuple[Recording, AnySchedule] | None = None
        parts = parts_of(plan, flow, model)
        self._parts = [parts[stage] for stage in stages_of_rank(plan, self._rank)]
        self._owners = owners_of(plan, parts)
        self._buffer_owners = buffer_owners(plan, parts, flow, model)
        self.kept = frozenset().union(*(part.parameters for part in self._parts))
        trainable = [name for name, p in model.named_parameters() if p.requires_grad]
        self._ties = ties_of(
            self._owners, world_size=plan.pp, trainable=trainable, timeout_s=timeout_s
        )
        release_others(model, self.kept, device=device)

    def require_equal_pieces(self, pieces: Sequence[Batch]) -> None:
        """Stages exchange tensors whose shapes they know beforehand.

        Raises:
            BatchError: microbatches differ in shape.
        """
        shapes = [describe(piece) for piece in pieces]
        if len(set(shapes)) == 1:
            return
        rows, count = sum(map(batch_size, pieces)), len(pieces)
        fitting = [n for n in (rows - rows % count, rows + count - rows % count) if n]
        raise BatchError(
            f"{rows} rows cannot be cut into {count} equal microbatches, as a pipeline needs them",
            where=f"plan: {self._plan}",
            hints=[
                f"give {' or '.join(map(str, fitting))} rows, or drop the short batch:"
                " DataLoader(..., drop_last=True)"
            ],
        )

    def forward_backward(self, pieces: Sequence[Batch], weights: Sequence[Tensor]) -> Tensor:
        """Run all microbatches; gradients are left on the parameters, tied ones summed.

        Returns the weighted sum of the losses, 0-d, on the rank of the last stage; zero elsewhere.
        """
        total = torch.zeros((), device=self._device)
        in_flight = 1 if self._plan.schedule is Schedule.NAIVE else self._plan.microbatches
        with self._step():
            schedule = self._schedule(pieces[0], in_flight)
            for start in range(0, len(pieces), in_flight):
                self._round.pieces = pieces[start : start + in_flight]
                self._round.weights = weights[start : start + in_flight]
                numbers, losses = torch.arange(in_flight), list[Tensor]()
                # Only the rank of the last stage has use for a target, and torch for one there.
                ends: dict[str, Any] = {}
                if self._parts[-1].is_last:
                    ends = {"target": numbers, "losses": losses}
                schedule.step(microbatch=numbers, return_outputs=False, **ends)
                for loss in losses:
                    total += loss.detach().reshape(())
            sum_gradients(self._ties, self._model)
        return total

    def evaluate(self, pieces: Sequence[Batch], weights: Sequence[Tensor]) -> Tensor:
        """The losses alone, as `forward_backward` returns them."""
        with self._step():
            self._round.pieces, self._round.weights = pieces, weights
            recording = self._recording(pieces[0])
            return forward_only(
                self._stages(recording),
                recording,
                microbatches=len(pieces),
                rank_of_stage=lambda stage: rank_of_stage(self._plan, stage),
                device=self._device,
            )

    def clip(self, max_norm: float) -> Tensor:
        """Scale gradients to a global L2 norm of at most `max_norm`; the norm before, everywhere.

        A tied parameter counts once.
        """
        kept = [self._model.get_parameter(name) for name in sorted(self.kept)]
        counted = [
            gradient.detach()
            for name in sorted(self.kept)
            if self._owners[name][0] == self._rank
            and (gradient := self._model.get_parameter(name).grad) is not None
        ]
        square = nn.utils.get_total_norm(counted).to(self._device, torch.float32).square()
        dist.all_reduce(square)
        norm = square.sqrt()
        nn.utils.clip_grads_with_norm_(kept, max_norm, norm)
        return norm

    def full_gradients(self) -> dict[str, Tensor]:
        """Gradients by original name, on every rank; all ranks call it."""
        parameters = dict(self._model.named_parameters())
        gradients = {name: parameters[name].grad for name in self.kept}
        found = gathered(gradients, self._first_owners(), like=parameters)
        return {name: gradient for name, gradient in found if gradient is not None}

    def whole_state(self) -> dict[str, object]:
        """`model.state_dict()` with every tensor from a rank that holds it; all ranks call it."""
        state: dict[str, object] = dict(self._model.state_dict())
        first_names = self._first_names()
        source = {**self._buffer_owners, **self._first_owners()}
        tensors = {
            first_names.get(name, name): value
            for name, value in state.items()
            if isinstance(value, Tensor)
        }
        whole = dict(gathered(tensors, source, like=tensors))
        return {name: whole.get(first_names.get(name, name), v) for name, v in state.items()}

    def holds(self, name: str) -> bool:
        """Whether this rank has the values of the parameter or buffer `name`."""
        first = self._first_names().get(name)
        return first is None or first in self.kept

    def owns(self, name: str) -> bool:
        """Whether this rank's copy of the parameter or buffer `name` is the one that counts."""
        first = self._first_names().get(name)
        owner = self._buffer_owners.get(name, 0) if first is None else self._owners[first][0]
        return owner == self._rank

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Around a step: what fails in a stage comes out as the model raised it, and the ranks
        that wait for this one are told."""
        try:
            yield
        except BaseException as error:
            self._ready = None  # its buffers hold half a step
            own = error.__cause__ if isinstance(error, RuntimeError) else None
            tell_others(own or error)
            if own is not None:
                raise own from None  # torch wraps it in one of its own
            raise
        finally:
            self._round.pieces, self._round.weights = (), ()

    def _schedule(self, piece: Batch, in_flight: int) -> AnySchedule:
        """Stages and buffers for microbatches of these shapes; kept while they stay the same."""
        recording = self._recording(piece)
        if self._ready is not None and self._ready[0] is recording:
            return self._ready[1]
        stages = [
            pipeline_stage(
                stage,
                recording,
                device=self._device,
                can_split=can_split(stage.part, self._flow, self._model),
            )
            for stage in self._stages(recording)
        ]
        assert self._plan.schedule is not None
        schedule = schedule_of(self._plan.schedule, stages, microbatches=in_flight)
        self._ready = recording, schedule
        return schedule

    def _stages(self, recording: Recording) -> list[Stage]:
        found = []
        for part in self._parts:
            replay = Replay(
                self._model, part, flow=self._flow, recording=recording, device=self._device
            )
            found.append(Stage(self._model, replay, round=self._round, loss_fn=self._loss_fn))
        return found

    def _recording(self, piece: Batch) -> Recording:
        key = self._key(piece)
        if key not in self._recordings:
            found = record(self._model, self._flow, piece, has_target=self._loss_fn is not None)
            while len(self._recordings) >= RECORDINGS_KEPT:
                del self._recordings[next(iter(self._recordings))]
            self._recordings[key] = found
        return self._recordings[key]

    def _key(self, piece: Batch) -> str:
        """What a recording depends on: shapes, values that are no tensors, the mode."""
        values = piece.values() if isinstance(piece, Mapping) else piece
        others = [] if isinstance(piece, Tensor) else [v for v in values if not _is_tensor(v)]
        return f"{describe(piece)} {others} {self._model.training}"

    def _first_owners(self) -> dict[str, int]:
        return {name: ranks[0] for name, ranks in self._owners.items()}

    def _first_names(self) -> dict[str, str]:
        """For every name of a parameter its first one."""
        first = {parameter: name for name, parameter in self._model.named_parameters()}
        every = self._model.named_parameters(remove_duplicate=False)
        return {name: first[parameter] for name, parameter in every}


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)
