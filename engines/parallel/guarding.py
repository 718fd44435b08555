"""Guards of a training: finite steps and equal replicas. A part of ParallelModel."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from engines.data.ddp import exchanges_gradients_alone, require_all_reduced
from engines.data.finite import FiniteGuard, nonfinite_element, nonfinite_output
from engines.data.fsdp import drop_unused
from engines.data.loss_mean import LossMean
from engines.data.loss_scale import LossScaler
from engines.data.replica_checksums import DEFAULT_EVERY, ReplicaChecksums
from engines.data.whole_gradients import OVER_REPLICAS, OVER_TP, require_alike
from engines.plan import Plan
from engines.runtime.mesh import Mesh
from engines.runtime.shared_rng import SharedRng
from engines.runtime.world import World, rank_error_context
from engines.state.layout import Layout
from engines.state.learning_parameters import LearningParameters
from engines.state.optimizer_settings import EqualSettings
from engines.state.own_reads import OwnReads
from engines.state.own_writes import OwnWrites
from engines.tensor.own_hooks import OwnHooks
from engines.tensor.split import TensorSplit
from profiles.capture.batch.call import Batch
from profiles.model.profile import ModelProfile

FIRST_STEPS = 3
"""Of a loop of the user's own, in which it shows whether it treats ranks alike."""


class GuardingMixin:
    """Stop the training if replicas differ; stop it, or skip the step, if values are not finite.

    Attributes:
        loss_scaler: scales losses of a model in fp32 that is computed in fp16, by its current
            `scale`; saved and loaded. It takes the state of a torch.amp.GradScaler.
    """

    loss_scaler: LossScaler
    plan: Plan
    module: nn.Module
    optimizer: torch.optim.Optimizer
    step: int
    _checksums: ReplicaChecksums
    _finite: FiniteGuard
    _loss_mean: LossMean
    _mesh: Mesh
    _is_pending: bool
    _is_unchecked: bool
    _job: World
    _layout: Layout
    _learning: LearningParameters
    _named: Sequence[tuple[str, nn.Parameter]]
    _own_hooks: OwnHooks
    _own_reads: OwnReads
    _own_writes: OwnWrites
    _profile: ModelProfile
    _rng: SharedRng
    _runner: Callable[..., Any]
    _settings: EqualSettings
    _split: TensorSplit | None
    _world: World

    @property
    def skipped_steps(self) -> int:
        """Steps skipped so far, by `on_nonfinite="skip"` or by an overflow under a loss scale;
        `step` counts them too."""
        return self._finite.skipped

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Scale the loss of a user's own loop: `parallel.scale_loss(loss).backward()`.

        The factor is the loss scale if a model in fp32 is computed in fp16, else 1. Gradients
        are divided by it when they are first read, or in the optimizer's step.
        """
        scale = self.loss_scaler.begin()
        return loss * scale if self.loss_scaler.is_on else loss

    def _watch_updates(self, optimizer: torch.optim.Optimizer) -> None:
        """Finish and check gradients before this optimizer steps, or another one on the same
        parameters; what is written to them by none is noted."""
        optimizer.register_step_pre_hook(self._before_update)
        own = weakref.ref(self)
        for handle in (
            register_optimizer_step_pre_hook(partial(_before_other_update, own)),
            register_optimizer_step_post_hook(partial(_after_update, own)),
        ):
            weakref.finalize(self, handle.remove)
        warns = self._job.rank == 0 and self.plan.updates_in_step
        self._own_writes = OwnWrites(self._named, self._layout, warns=warns)
        self._own_reads = OwnReads(self._named, self._layout, warns=warns)
        styles = {} if self._split is None else self._split.styles
        has_parts = bool(styles) or self.plan.cp > 1
        self._own_hooks = OwnHooks(
            self.module, styles, of_tokens=self.plan.cp > 1, warns=warns and has_parts
        )

    def _before_update(self, *_: object) -> None:
        self._own_reads.end()
        self._finish_pending()
        if self._is_due:
            self._own_hooks.warn()
        self._learning.require_known()
        self._check_update()

    def _check_unused(self) -> None:
        """Check after a backward what parameters it did not reach."""
        if isinstance(self._runner, DistributedDataParallel):
            require_all_reduced(self._named, self._profile)
        elif isinstance(self.module, FSDPModule):
            drop_unused(self.module, self._profile)

    @rank_error_context("comparing gradients")
    def _check_update(self) -> None:
        """Check gradients of a classic loop before its optimizer steps."""
        if not self._is_unchecked:
            return
        self._is_unchecked = False
        if self._finite.is_on:
            unknown = torch.zeros((), device=self._world.device)
            mean = self._loss_mean.of(self._finite.marked(unknown))
            self._finite.passes(mean, unknown, step=self.step + 1)
        self._compare_ranks_when_due()
        self._require_alike_gradients()

    @property
    def _is_due(self) -> bool:
        """True in the first steps, and now and then: of checks of what a loop does by itself."""
        return self.step < FIRST_STEPS or self.step % DEFAULT_EVERY == 0

    def _require_alike_gradients(self) -> None:
        """Compare gradients that a loop may have made or scaled: in the first steps, and now and
        then."""
        if self._world.is_fake or not self._is_due:
            return
        device, step = self._world.device, self.step + 1
        require = partial(require_alike, device=device, step=step)
        split = self._split
        if split is not None and self._mesh.tp.size > 1:
            whole = [(n, p) for n, p in self._named if n not in split.slices]
            require(whole, self._mesh.tp, where="of the tp axis", hints=OVER_TP)
        if exchanges_gradients_alone(self._runner, self.plan, self._world):
            require(self._named, self._mesh.replicas, where="of the data axes", hints=OVER_REPLICAS)

    def _compare_ranks_when_due(self) -> None:
        """Compare parameters of replicas, and settings of all ranks' optimizers."""
        self._checksums.require_equal_when_due(self.step)
        self._settings.require_equal_when_due(self.step)

    def _origin(self, pieces: Sequence[Batch]) -> str:
        """Locate the first value that is not finite by repeating the forwards of this rank.

        All ranks call it, because forwards exchange parameters.

        Raises:
            RankMismatchError: it is a replica that differs.
        """
        self._checksums.require_equal(self.step)
        element = next(filter(None, map(nonfinite_element, pieces)), "")
        outputs: list[str] = []
        losses: list[Tensor] = []
        # Under pp and compile, modules are not called one by one.
        if self.plan.pp == 1 and not self.plan.compile:
            try:
                with torch.no_grad(), self._rng.shared(), nonfinite_output(self.module) as outputs:
                    losses = [self._loss(piece, lambda: 1.0) for piece in pieces]
            except Exception:  # the first error says more than that of a second run
                outputs, losses = [], []
        if element:
            return f"the batch has a value that is not finite in `{element}`"
        if outputs:
            return f"the first output that is not finite is that of `{outputs[0]}`"
        if not all(bool(loss.isfinite()) for loss in losses):
            return "every output is finite, the loss of it is not"
        return ""

    def _finish_pending(self) -> None:
        raise NotImplementedError

    def _loss(self, piece: Batch, weigh: Callable[[], float]) -> Tensor:
        raise NotImplementedError


def _before_other_update(
    reference: weakref.ref[GuardingMixin], optimizer: torch.optim.Optimizer, *_: object
) -> None:
    """Before a step of any optimizer: that of a model whose gradients wait to be summed."""
    model = reference()
    if model is None or not model._is_pending or optimizer is model.optimizer:
        return
    if _steps_of(model, optimizer):
        model._before_update()


def _after_update(
    reference: weakref.ref[GuardingMixin], optimizer: torch.optim.Optimizer, *_: object
) -> None:
    """After a step of any optimizer."""
    model = reference()
    if model is None or not model._own_writes.watches:
        return
    if optimizer is model.optimizer or _steps_of(model, optimizer):
        model._own_writes.note()


def _steps_of(model: GuardingMixin, optimizer: torch.optim.Optimizer) -> bool:
    """True if the optimizer has parameters of the model."""
    own = {id(parameter) for _, parameter in model._named}
    return any(id(p) in own for group in optimizer.param_groups for p in group["params"])
