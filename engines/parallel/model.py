"""ParallelModel: a model under a plan, with the same calls for every plan."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from engines.blocks.autocast import as_fp32, autocast
from engines.blocks.logits import whole_tensors
from engines.blocks.recompute import explained_recompute
from engines.context.context import Context
from engines.data.ddp import exchanges_gradients_alone, reducible_forward
from engines.data.explained import explained_errors
from engines.data.finite import FiniteGuard, OnNonfinite
from engines.data.fsdp import prepare_backward, release, start_over, whole_gradients
from engines.data.gradients import clip_gradients, full_gradients
from engines.data.hidden_outputs import every_tensor_in
from engines.data.loader import ShardedLoader
from engines.data.loss_mean import LossMean
from engines.data.loss_rule import LossParts, LossWeight
from engines.data.loss_scale import LossScaler
from engines.data.loss_weight import WeightedBatch, silence, weighted
from engines.data.microbatches import MicrobatchCutter
from engines.data.noise_scale import NoiseMeter
from engines.data.replica_checksums import ReplicaChecksums
from engines.data.replicas import sum_gradients
from engines.data.running_statistics import StatisticsBroadcast
from engines.experts.experts import Experts
from engines.offload.pool import OffloadPool
from engines.optional.async_updates.exchange import UpdateExchange
from engines.parallel.async_updates import AsyncUpdatesMixin
from engines.parallel.fit import FitMixin
from engines.parallel.guarding import GuardingMixin
from engines.parallel.interop import InteropMixin
from engines.parallel.monitoring import MonitoringMixin
from engines.parallel.naming import NamingMixin
from engines.parallel.recovery import RecoveryMixin
from engines.plan import Plan
from engines.runtime.heartbeat import end_heartbeat
from engines.runtime.learning_rate import Rates
from engines.runtime.mesh import Mesh
from engines.runtime.rank_times import RankTimer
from engines.runtime.shared_rng import SharedRng
from engines.runtime.step_bound import StepBound
from engines.runtime.steps import Steps
from engines.runtime.world import World, rank_error_context
from engines.state.checkpoint.objects import Stateful
from engines.state.checkpoint.save import CheckpointSave
from engines.state.layout import LayerSplit, Layout
from engines.state.learning_parameters import LearningParameters
from engines.state.optimizer_settings import EqualSettings
from profiles.capture.batch.call import Batch, call_model, loss_of, with_gradient
from profiles.errors import PlanError
from profiles.model.profile import ModelProfile

if TYPE_CHECKING:
    from engines.pipeline.pipeline import Pipeline

LossFn = Callable[..., Tensor]


class ParallelModel(  # type: ignore[misc]  # state_dict
    NamingMixin,
    MonitoringMixin,
    AsyncUpdatesMixin,
    FitMixin,
    InteropMixin,  # before others that name what it has
    GuardingMixin,
    RecoveryMixin,
    nn.Module,
):
    """A model under a plan: train it with `train_step`, or in a classic loop.

    `train_step(batch)` cuts the rank's part of the global batch into the plan's microbatches, runs
    forward and backward on each, exchanges gradients, clips, steps, and returns the loss averaged
    over the samples of all ranks. It does not switch between train and eval mode.

    Plans with asynchronous or periodic updates (`updates`, `servers`) are trained by the same
    script: every rank calls `train_step` equally often. On a server it serves until all remaining
    workers have had their step, and ignores the batch. On asynchronous workers and on replicas
    between two averages the loss is that of the rank's own samples, and `max_grad_norm` applies to
    its own gradients.

    A classic loop works for plans without stages: `out = parallel(x); loss.backward();
    parallel.optimizer.step(); parallel.optimizer.zero_grad()`.

    Attributes:
        module: the user's own module, with parameters as the plan says.
        plan: how it is spread.
        decision: why; None where the plan was given.
        optimizer: steps the parameters that this rank holds.
        data_rank, data_world_size: this rank's part of the data, of how many.
        steps: times of `train_step`.
        offload_pool: the memory outside the device that the plan takes for activations, for states
            of whole parameters or for files, and how much of it; None where it takes none.
    """

    decision: object
    _runner: Callable[..., Any]

    def __init__(
        self,
        module: nn.Module,
        runner: Callable[..., Any],
        *,
        plan: Plan,
        profile: ModelProfile,
        world: World,
        mesh: Mesh,
        layout: Layout,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFn | None,
        loss_weight: LossWeight | None,
        loss_parts: LossParts,
        max_grad_norm: float | None,
        on_nonfinite: OnNonfinite,
        check_replicas_every: int,
        autocast_to: torch.dtype | None,
        scaler: LossScaler,
        seed: int,
        pipeline: Pipeline | None = None,
        split: LayerSplit | None = None,
        noise: NoiseMeter | None = None,
        exchange: UpdateExchange | None = None,
        job: World | None = None,
        context: Context | None = None,
        experts: Experts | None = None,
        offload_pool: OffloadPool | None = None,
    ) -> None:
        """`world` are the ranks that make a step together; `job` all, where those are others."""
        super().__init__()
        self.module = module
        self.plan = plan
        self.decision = self.next_plan = None
        self.optimizer = optimizer
        self.offload_pool = offload_pool
        self._exchange = exchange or UpdateExchange(
            world.device, replica=mesh.data.position, replicas=mesh.data.size
        )
        self.data_rank = self._exchange.replica
        self.data_world_size = self._exchange.replicas
        self.steps = Steps(plan, profile, world)
        self.step_bound = StepBound(self.steps, job or world, is_compiled=plan.compile)
        self._rates = Rates(optimizer)
        self._rank_timer = RankTimer(module, plan, profile, world)
        self._profile = profile
        self._world, self._job = world, job or world
        self._mesh, self._layout = mesh, layout
        self._loss_fn, self._max_grad_norm = loss_fn, max_grad_norm
        self.loss_scaler = scaler
        self._autocast_to = autocast_to
        self._seed = seed
        self._pipeline, self._split = pipeline, split
        self._noise = noise
        self._context = context
        self._experts = experts
        self._rng = SharedRng(mesh.tp, world.device, is_uneven=layout.is_uneven)
        is_wrapped = isinstance(runner, DistributedDataParallel)
        overlaps = exchanges_gradients_alone(runner, plan, world)
        named = self._named = tuple(module.named_parameters())
        # DDP exchanges what learns by now; a parameter that begins to later is averaged here.
        by_engine = {
            n for n, p in named if (is_wrapped and p.requires_grad) or isinstance(p, DTensor)
        }
        others = by_engine | set(experts.names if experts is not None else ())
        self._averaged = [n for n, _ in named if layout.holds(n) and n not in others]
        require = pipeline.require_equal_pieces if pipeline is not None else None
        self._cutter = MicrobatchCutter(
            module,
            plan,
            profile=profile,
            world=world,
            loss_weight=loss_weight,
            parts=loss_parts,
            replica=mesh.data.position,
            require=context.require if context is not None else require,
            overlaps=overlaps,
        )
        self._finite = FiniteGuard(module, named, world, on_nonfinite, scaler, is_wrapped)
        self._statistics = StatisticsBroadcast(
            module, world.device, mesh.replicas, is_on=not plan.sync_batch_norm
        )
        self._loss_mean = LossMean(world, mesh, self._finite, is_early=overlaps and noise is None)
        self._checksums = ReplicaChecksums(
            module,
            mesh,
            layout,
            world,
            experts=experts.names if experts is not None else (),
            every=check_replicas_every,
        )
        self._settings = EqualSettings(optimizer, world, mesh.pp, every=check_replicas_every)
        waits = is_wrapped and not profile.may_skip_parameters
        self._learning = LearningParameters(named, optimizer, plan, ddp_waits=waits)
        self._is_pending = self._is_unchecked = False
        self._watch_updates(optimizer)
        if not plan.updates_in_step:
            end_heartbeat()  # such plans go on without a lost rank
        self.step = 0
        self._objects: dict[str, Stateful] = {}
        self._loaders: list[weakref.ref[ShardedLoader]] = []
        self._cutter.iterated = self._iterated_loaders
        self._saving: CheckpointSave | None = None
        optimizer.register_step_post_hook(self._count_step)
        # Not in the module tree: a wrapper must not show in names or state dicts.
        object.__setattr__(self, "_runner", runner)

    @rank_error_context("running the model")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward in the plan's precision; outputs are fp32 or as built.
        Inputs are moved to this rank's device, as DDP does.

        Raises:
            PlanError: in a pipeline no rank has the whole model.
        """
        if self._pipeline is not None:
            raise PlanError(
                "a pipeline cannot be called: a rank has its own stages only",
                where=f"plan: {self.plan}",
                hints=["use `train_step(batch)` and `eval_step(batch)`, on all ranks"],
            )
        self._require_values()
        if torch.is_grad_enabled():
            self._require_own_step()

        def whole(*args: Any, **kwargs: Any) -> Any:
            return whole_tensors(self._run_forward(*args, **kwargs))

        context, (args, kwargs) = self._context, self._cutter.copies.here((args, kwargs))
        output = context.forward(whole, args, kwargs) if context else whole(*args, **kwargs)
        self._await_backward(every_tensor_in(output))
        return output

    def _run_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a loss that is computed here: logits may stay sharded, or unmade."""
        self._own_reads.end()
        try:
            with (
                reducible_forward(),
                explained_errors(self.module, self.plan),
                self._rng.shared(),
                autocast(self._world.device, self._autocast_to),
            ):
                output = self._runner(*args, **kwargs)
        except BaseException:
            start_over(self.module, self.plan)
            raise
        if not torch.is_grad_enabled():
            release(self.module)  # no backward will follow to do it
        return as_fp32(output, self._autocast_to)

    def train_step(self, batch: Batch) -> Tensor:
        """Take one optimizer step on this rank's part of the global batch.

        The loss is the mean over the global batch, however its rows lie: every microbatch weighs as
        much as what its own loss is a mean over. That is its samples, or the targets that count
        where the loss was seen to be a mean over those (`profile.loss_terms`); of another loss
        `loss_weight` says it.

        Returns the loss averaged over all samples of all ranks: 0-d, on the device, no gradient;
        nan where the step was left out (`skipped_steps`).

        Raises:
            BatchError: more rows than the plan's microbatches hold, or tensors that do not agree.
            RankError: names a rank that failed, is gone or late, without which there is no step.
            NonFiniteError: a loss or a gradient is nan or inf on some rank; nothing was stepped.
            RankMismatchError: replicas' parameters differ.
            ShortageError: a rank ran out of memory, and no plan is left that takes less.
        """
        if self._exchange.replace_step():
            self.step += 1
            return self._exchange.take_loss()
        with self.steps.noted(batch):
            loss = self.forward_backward(batch)
            self._exchange.note(loss, self._cutter.counted)
            with self._updating():
                if self._max_grad_norm is not None:
                    self.clip_grad_norm_(self._max_grad_norm)
                with self.steps.updating():
                    self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return self._exchange.take_loss()

    @rank_error_context("exchanging gradients")
    def forward_backward(self, batch: Batch) -> Tensor:
        """Run `train_step` up to the optimizer step; gradients are averaged over the global batch.

        If it raises, no gradients are left, and the next call starts clean. Under asynchronous
        or periodic updates gradients are those of the rank's own part.
        """
        self._require_own_batch()
        self._require_ready()
        return self._with_retries(lambda: self._forward_backward(batch))

    def _forward_backward(self, batch: Batch) -> Tensor:
        self._compare_ranks_when_due()
        self._follow_first_replica(in_step=True)
        with self._rank_timer.synchronised():
            microbatches = self._cutter.cut(batch)
        scale = self.loss_scaler.begin()
        if self._noise is not None:
            self._noise.begin(microbatches.weights, samples=self._cutter.total, scale=scale)
        self._finite.begin()
        with self._rng.shared():
            total = self._run_microbatches(microbatches, scale)
        self._rank_timer.note_wait(microbatches.waited_s)
        self._statistics.finish()
        self._finish_gradients()
        self._rank_timer.note_exchange()
        self._is_pending = self._is_unchecked = self._is_local = False
        self._check_unused()
        self._note_changed_buffers()
        self.steps.pace = self._rank_timer.compare() or self.steps.pace
        of_noise = None if self._noise is None else self._noise.parts()
        mean, of_noise = self._loss_mean.finish(total, of_noise)
        origin = partial(self._origin, microbatches.pieces)
        passes = self._finite.passes(mean, total, step=self.step + 1, origin=origin)
        if passes and self._noise is not None and of_noise is not None:
            self._noise.note(of_noise)
        return mean

    @rank_error_context("averaging the loss")
    @torch.no_grad()
    def eval_step(self, batch: Batch) -> Tensor:
        """Return the loss, averaged over all samples of all ranks; no gradients.

        Call `eval()` before and `train()` after where the model distinguishes them.
        """
        total = torch.zeros((), device=self._world.device)
        if self._exchange.serves:
            return self._exchange.average(total, 0.0)
        self._follow_first_replica()
        microbatches = self._cutter.cut(batch, is_training=False)
        weights, pieces = microbatches.weights, microbatches.pieces
        with self._rng.shared():
            if self._pipeline is not None:
                total += self._pipeline.evaluate(pieces, weights)
                start_over(self.module, self.plan)  # forwards of stages end early
                pieces = []
            for index, piece in enumerate(pieces):
                total += self._loss(piece, partial(microbatches.weight, index))
        return self._exchange.average(self._loss_mean.of(total), self._cutter.counted)

    def shard(self, loader: Iterable[Batch]) -> ShardedLoader:
        """Wrap a loader of global batches: the result yields this replica's rows of each.

        Raises:
            BatchError: its batches are larger than the plan's, or the model takes no part of one.
        """
        sharded = ShardedLoader(
            loader,
            replica=self.data_rank,
            replicas=self.data_world_size,
            seed=self._seed,
            dims=self._profile.batch_dims,
            copies=self._cutter.copies,
            draws=self._cutter.draws,
        )
        sharded.warn_of_shared_memory(self._profile)
        self._cutter.note_sharded(sharded)
        self._loaders.append(weakref.ref(sharded))
        return sharded

    @rank_error_context("summing the norms of gradients")
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global L2 norm is at most `max_norm`.

        Returns the norm before clipping, over all shards, the same on every rank.
        """
        self._finish_pending()
        return clip_gradients(self.module, self._layout, self._mesh, max_norm)

    @rank_error_context("gathering gradients")
    def full_gradients(self) -> dict[str, Tensor]:
        """Return whole gradients by original name, on every rank; all ranks must call it."""
        self._finish_pending()
        return full_gradients(self.module, self._layout)

    def _loss(self, piece: Batch, weigh: Callable[[], float]) -> Tensor:
        """Compute the weighted loss of a microbatch: the mean over the ranks that have its rows."""
        if self._context is not None:
            return weighted(self._context.loss(self._run_forward, piece, self._loss_fn), weigh())
        has_target, own = self._loss_fn is not None, self.module.forward
        output = call_model(self._run_forward, piece, has_target=has_target, forward=own)
        weight = weigh()
        silence(output, weight)
        loss = loss_of(output, piece, self._loss_fn)
        return weighted(loss.to(self._world.device), weight)  # from where its author put it

    def _run_microbatches(self, microbatches: WeightedBatch, scale: float) -> Tensor:
        """Run the forwards and backwards of a step; return its loss on this rank."""
        total = torch.zeros((), device=self._world.device)
        with explained_recompute(self.plan):
            if self._pipeline is not None:
                weights = [weight * scale for weight in microbatches.weights]
                loss = self._pipeline.forward_backward(
                    microbatches.pieces, weights, around_round=self._backward_mode
                )
                return total + self.loss_scaler.unscaled(loss)
            last = len(microbatches.pieces) - 1
            for index, piece in enumerate(microbatches.pieces):
                with self._backward_mode(index == last), self._measured_noise(index):
                    weigh = partial(microbatches.weight, index, scale)
                    loss = with_gradient(self._loss(piece, weigh))
                    total += self.loss_scaler.unscaled(loss.detach())
                    if index == last:
                        self._statistics.begin()
                        self._loss_mean.begin(total)
                    loss.backward()
        return total

    def _finish_gradients(self) -> None:
        """Average gradients over replicas; sum them over the tp axis and tied parameters. All of it
        is linear, so each step may work on the result of the last."""
        pipeline, split = self._pipeline, self._split
        if self._averaged and self._mesh.replicas.size > 1:
            averaged = map(self.module.get_parameter, self._averaged)
            replicas = self._mesh.replicas
            sum_gradients(averaged, replicas.group, divisor=replicas.size)
        if self._experts is not None:
            self._experts.average()
        if split is not None:
            partial = filter(self._layout.holds, sorted(split.partial))
            sum_gradients(map(self.module.get_parameter, partial), self._mesh.tp.group)
        if pipeline is not None:
            pipeline.finish_gradients()
        self.loss_scaler.unscale()

    def _backward_mode(self, last: bool) -> AbstractContextManager[None]:
        """Wrap a backward, or a round of a pipeline; gradients are exchanged in the last one."""
        if isinstance(self.module, FSDPModule):
            if self._pipeline is not None:
                return whole_gradients(self.module, self.plan, last=last)
            prepare_backward(self.module, self.plan, last=last)
        elif isinstance(self._runner, DistributedDataParallel) and not last:
            return self._runner.no_sync()
        return nullcontext()
