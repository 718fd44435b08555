"""A model spread over the stages of a pipeline: one rank's share of every step.

With data axes every replica is a pipeline of its own; replicas average gradients after a round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from engines.data.replicas import has_gradient
from engines.pipeline.evaluation import forward_only
from engines.pipeline.hooks import UserHooks
from engines.pipeline.model_snapshot import ModelSnapshot
from engines.pipeline.ownership import buffer_owners, owners_of, release_others
from engines.pipeline.recording import Recording, Shares, record
from engines.pipeline.replay import Replay
from engines.pipeline.schedules import AnySchedule, schedule_of
from engines.pipeline.segments import Segment, is_unit, rank_of_stage, segments_of, stages_of_rank
from engines.pipeline.split_backward import can_split
from engines.pipeline.stage import Round, Stage, pipeline_stage
from engines.pipeline.tied_parameters import sum_ties, ties_of
from engines.plan import Plan, Recompute
from engines.runtime.failures import abort_groups
from engines.runtime.mesh import Mesh
from profiles.capture.batch.call import Batch, LossFn
from profiles.capture.batch.tree import batch_items, describe
from profiles.capture.frames import summary
from profiles.errors import BatchError, ModelError
from profiles.model.profile import ModelProfile, Numerics
from profiles.torch_compat.sent_messages import SentMessages, let_go_of_sent

MOST_RECORDINGS = 16
"""Batches of other shapes are recorded anew; a data set has a few lengths, not hundreds."""
_IN_PLACE = "has been modified by an inplace operation"  # torch/csrc/autograd/saved_variable.cpp


class Pipeline:
    """The stages of this rank, and the exchange between them; all ranks make it together.

    Parameters that this rank's stages do not use are freed when it is made.

    Attributes:
        local: first names of the parameters that this rank holds.
        owners: positions on the pp axis that hold a parameter, ascending, by its first name.
        buffer_owners: the position whose copy of a buffer counts, by any of its names.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        profile: ModelProfile,
        numerics: Numerics,
        mixed: torch.dtype | None,
        mesh: Mesh,
        device: torch.device,
        loss_fn: LossFn | None,
        shares: Shares,
    ) -> None:
        flow = profile.flow
        self._model = model
        self._snapshot = ModelSnapshot(model)
        self._hooks = UserHooks(model, {call.unit for call in flow.calls if is_unit(call)})
        self._plan = plan
        self._flow = flow
        self._unused = profile.unused
        self._numerics = numerics
        self._mixed = mixed
        self._cast = [unit.name for unit in profile.shard_units()]
        self._blocks = {unit.name for unit in profile.blocks()}
        self._axis = mesh.pp
        self._device = device
        self._loss_fn = loss_fn
        self.shares = shares
        self._round = Round()
        self._recordings: dict[str, Recording] = {}
        self._ready: tuple[Recording, AnySchedule, SentMessages | None] | None = None
        segments = segments_of(plan, flow, model)
        self._segments = [segments[stage] for stage in stages_of_rank(plan, mesh.pp.position)]
        self.owners: Mapping[str, Sequence[int]] = owners_of(plan, segments)
        self.buffer_owners: Mapping[str, int] = buffer_owners(plan, segments, flow, model)
        self.local = frozenset().union(*(segment.parameters for segment in self._segments))
        trainable = [name for name, p in model.named_parameters() if p.requires_grad]
        self._ties = ties_of(self.owners, mesh=mesh, trainable=trainable)
        release_others(model, self.local, device=device)

    def require_stages(self, sample: Batch) -> None:
        """Require that the stages of this rank can run a batch like `sample`; nothing runs.

        Raises:
            ModelError: a unit returns what no later stage can be sent, or see `record`.
        """
        self._stages(self._recording(sample))

    def require_equal_pieces(self, pieces: Sequence[Batch]) -> None:
        """Require microbatches of equal shapes in each round: stages allocate buffers beforehand.

        Raises:
            BatchError: microbatches differ in shape.
        """
        for start in range(0, len(pieces), self._plan.in_flight):
            shapes = [describe(piece) for piece in pieces[start : start + self._plan.in_flight]]
            other = next((shape for shape in shapes if shape != shapes[0]), None)
            if other is not None:
                raise BatchError(
                    "microbatches differ in their shapes, a pipeline needs equal ones",
                    where=f"{shapes[0]}\n{other}\nplan: {self._plan}",
                    hints=[
                        "pad the samples of a batch to one size",
                        "or set schedule=naive, which runs one at a time, or pp=1",
                    ],
                )

    def forward_backward(
        self,
        pieces: Sequence[Batch],
        weights: Sequence[float],
        *,
        around_round: Callable[[bool], AbstractContextManager[None]],
    ) -> Tensor:
        """Run all microbatches; gradients are left on the parameters.

        Returns the weighted sum of the losses, 0-d, on the rank of the last stage; zero elsewhere.

        Args:
            around_round: a context for each round; its argument says whether it is the step's last.
        """
        total = torch.zeros((), device=self._device)
        in_flight = self._plan.in_flight
        with self._step():
            for start in range(0, len(pieces), in_flight):
                schedule, sent = self._schedule(pieces[start], in_flight)
                part = slice(start, start + in_flight)
                self._round.begin(pieces[part], weights[part])
                numbers, losses = torch.arange(in_flight), list[Tensor]()
                # torch wants a target on the rank of the last stage, and none elsewhere.
                ends: dict[str, Any] = {}
                if self._segments[-1].is_last:
                    ends = {"target": numbers, "losses": losses}
                with around_round(start + in_flight >= len(pieces)):
                    schedule.step(microbatch=numbers, return_outputs=False, **ends)
                    if sent is not None:
                        sent.finish()
                for loss in losses:
                    total += loss.detach().reshape(())
        return total

    def finish_gradients(self) -> None:
        """Give every copy of a parameter the sum of the gradients of all copies.

        Parameters that no loss depends on have none, and optimizers skip them: their stage was sent
        zeros, where the next one has no use for what it made.
        """
        sum_ties(self._ties, self._model)
        for name in self._unused:
            parameter = self._model.get_parameter(name)
            if not has_gradient(parameter):
                parameter.grad = None

    def evaluate(self, pieces: Sequence[Batch], weights: Sequence[float]) -> Tensor:
        """The losses alone, as `forward_backward` returns them."""
        total, in_flight = torch.zeros((), device=self._device), self._plan.in_flight
        with self._step():
            for start in range(0, len(pieces), in_flight):
                part = slice(start, start + in_flight)
                self._round.begin(pieces[part], weights[part])
                recording = self._recording(pieces[start])
                total += forward_only(
                    self._stages(recording),
                    recording,
                    microbatches=in_flight,
                    rank_of_stage=lambda stage: rank_of_stage(self._plan, stage),
                    axis=self._axis,
                    device=self._device,
                )
        return total

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Around a step: raise the model's own error, and abort the groups so that waiting ranks
        learn of it."""
        try:
            yield
        except BaseException as error:
            self._ready = None  # its buffers hold half a step
            own = error.__cause__ if isinstance(error, RuntimeError) else None
            abort_groups(own or error)
            if _IN_PLACE in str(own or error):
                raise ModelError(
                    "a stage writes in place into a tensor that the backward of an earlier"
                    " microbatch needs: its forwards go on before that",
                    where=f"plan: {self._plan}\n{summary(own or error)}",
                    hints=[
                        "let it put another one in its place: `self.mean = 0.9 * self.mean`, or"
                        " compute with a clone of it",
                        "or take one microbatch: microbatches=1 schedule=naive",
                    ],
                ) from None
            if own is not None:
                raise own from None  # torch wraps it in one of its own
            raise
        finally:
            self._round.begin()

    def _schedule(self, piece: Batch, in_flight: int) -> tuple[AnySchedule, SentMessages | None]:
        """Stages and buffers for microbatches of these shapes; reused while they stay the same."""
        recording = self._recording(piece)
        if self._ready is not None and self._ready[0] is recording:
            return self._ready[1:]
        stages = [
            pipeline_stage(
                stage,
                recording,
                device=self._device,
                can_split=self._can_split(stage.segment),
                group=self._axis.group,
            )
            for stage in self._stages(recording)
        ]
        assert self._plan.schedule is not None
        schedule = schedule_of(self._plan.schedule, stages, microbatches=in_flight)
        sent = let_go_of_sent(schedule, stages)
        self._ready = recording, schedule, sent
        return schedule, sent

    def _stages(self, recording: Recording) -> list[Stage]:
        stages = []
        repeated = self._repeated() if len(self._segments) > 1 else []
        for segment in self._segments:
            replay = Replay(
                self._model,
                segment,
                flow=self._flow,
                recording=recording,
                hooks=self._hooks,
                device=self._device,
            )
            stages.append(
                Stage(
                    self._model,
                    replay,
                    round=self._round,
                    loss_fn=self._loss_fn,
                    autocast_to=None if self._plan.data_parallel.is_sharded else self._mixed,
                    repeated=repeated,
                )
            )
        return stages

    def _repeated(self) -> list[nn.Module]:
        """Modules whose code every stage runs: all but units that are stubs on other stages."""
        once = {
            call.unit
            for call in self._flow.calls
            if is_unit(call) and any(value.depends_on_parameters for value in call.values)
        }
        within = {module for unit in once for module in self._model.get_submodule(unit).modules()}
        return [module for module in self._model.modules() if module not in within]

    def _can_split(self, segment: Segment) -> bool:
        """False under FSDP2: it takes the end of the inputs' half for the end of the backward.

        A chunked loss has all its gradients at once, and gives them once. A block that is computed
        again would be in each half, of which selective recompute has no second time.
        """
        plan = self._plan
        is_whole = plan.data_parallel.is_sharded or (segment.is_last and plan.loss_chunks > 1)
        if segment.index and plan.recompute is not Recompute.NONE:
            own = self._flow.calls[segment.first : segment.last]
            is_whole |= any(call.unit in self._blocks for call in own)
        return not is_whole and can_split(segment, self._flow, self._model)

    def _recording(self, piece: Batch) -> Recording:
        key = self._key(piece)
        if key not in self._recordings:
            with self._snapshot.in_place():
                recording = record(
                    self._model,
                    self._flow,
                    piece,
                    has_target=self._loss_fn is not None,
                    numerics=self._numerics,
                    mixed=self._mixed or torch.bfloat16,
                    cast=self._cast,
                    shares=self.shares,
                )
            while len(self._recordings) >= MOST_RECORDINGS:
                del self._recordings[next(iter(self._recordings))]
            self._recordings[key] = recording
        self.shares.begin(self._recordings[key])
        return self._recordings[key]

    def _key(self, piece: Batch) -> str:
        """The key of a recording: shapes, values that are no tensors, the mode."""
        others = [value for _, value in batch_items(piece) if not isinstance(value, Tensor)]
        return f"{describe(piece)} {others} {self._model.training}"
