"""Recovery from running out of memory: repeat the step under a plan that needs less.

A step changes no parameter before its gradients are exchanged, so one that failed can be repeated.
The rank that ran out closes its connections, so that every rank leaves the step; the ranks agree on
what happened, reconnect, and adopt the same plan. Engines choose none: they ask `next_plan`. A part
of ParallelModel.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from engines.blocks.recompute import recompute_blocks, recomputed
from engines.data.fsdp import start_over
from engines.data.microbatches import MicrobatchCutter
from engines.data.running_statistics import running_statistics
from engines.plan import Compression, Offload, Plan
from engines.runtime.failed_step import BrokenStep, is_of_others, leave_step
from engines.runtime.failures import (
    announce_shortage,
    close_all_connections,
    is_lost_contact,
    is_shortage_announced,
    reconnect,
)
from engines.runtime.mesh import Mesh
from engines.runtime.random_states import random_states, restore_random_states
from engines.runtime.shortage import Shortage, shortage_of
from engines.runtime.steps import Steps
from engines.runtime.world import World, texts_of_ranks
from profiles.allocator.process_peak import release_freed_memory
from profiles.errors import ShortageError
from profiles.model.profile import ModelProfile
from profiles.record import Record, json_object
from profiles.torch_compat import version_of
from profiles.torch_compat.ddp import forget_backward_underway
from profiles.torch_compat.gloo import is_reconnectable

log = logging.getLogger(__name__)

MOST_RETRIES = 2
"""Of one step: a plan that is too large by more than that was not predicted at all."""


class NextPlan(Record):
    """An answer to a shortage.

    Attributes:
        plan: that takes less; None where there is none.
        because: what was predicted and what there is, in numbers.
    """

    plan: Plan | None
    because: str


Chooser = Callable[[Plan, Shortage], NextPlan]


class RecoveryMixin:
    """Repeat steps that run out of memory.

    Attributes:
        next_plan: asked on rank 0 for a plan that takes less than the one that failed; None: a
            shortage ends the training.
    """

    next_plan: Chooser | None
    module: nn.Module
    plan: Plan
    step: int
    steps: Steps
    _cutter: MicrobatchCutter
    _ended: BrokenStep | None = None
    _mesh: Mesh
    _profile: ModelProfile
    _runner: Callable[..., Any]
    _state: _StepState | None = None
    _world: World

    def _with_retries(self, attempt: Callable[[], Tensor]) -> Tensor:
        """Run `attempt`, a step up to its gradients, until it succeeds; if it raises, no gradients
        are left.

        Raises:
            ShortageError: on all ranks, if no plan is left that can be followed here.
            RankError: another rank failed in this step, or in one that ended the job.
        """
        retries = 0
        self._require_connections()
        while True:
            before = self._record_state() if self.next_plan else None
            try:
                with self._in_step():
                    return attempt()
            except BaseException as error:
                own = shortage_of(error, rank=self._world.rank, device=self._world.device)
                self._discard_gradients()
                is_elsewhere = own is None and self._is_shortage_elsewhere(error)
                because = self._why_not_repeated(before)
                if because and own is not None:
                    shortage = self._shortage_error(own, self._answer(own), because)
                    if self.plan.pp == 1:  # a pipeline has closed its connections
                        self._leave_step(shortage, before)
                    raise shortage from error
                if own is None and not is_elsewhere:
                    if not is_of_others(error):
                        self._cutter.take_back()
                    self._leave_step(error, before)
                if because or not (own or is_elsewhere):
                    raise
            # Outside of `except`: the error holds the tensors of the step.
            self._recover(own, is_last=retries == MOST_RETRIES)
            retries += 1
            assert before is not None
            before.restore()

    @contextmanager
    def _updating(self) -> Iterator[None]:
        """Guard the optimizer: one that fails leaves parameters half stepped."""
        try:
            yield
        except Exception as error:
            own = shortage_of(error, rank=self._world.rank, device=self._world.device)
            because = "in the update, which may have changed some parameters"
            if own is None:
                self._leave_step(error, None, because)
                raise
            shortage = self._shortage_error(own, self._answer(own), because)
            self._leave_step(shortage, None, because)
            raise shortage from error

    def _leave_step(
        self, error: BaseException, before: _StepState | None, why_not: str = ""
    ) -> None:
        """Leave a step that raised `error` together with all ranks, so that none waits for another.

        Raises:
            RankError: names the rank that failed, if that is another one.
        """
        world = self._world
        can_meet = world.size > 1 and not world.is_fake and self.plan.updates_in_step
        if not can_meet or not isinstance(error, Exception):
            return
        if not why_not:
            unknown = "and the state before it is unknown (`auto_parallelize` records it)"
            why_not = unknown if before is None else self._why_not_repeated(before)
        broken = leave_step(
            error,
            step=self.step + 1,
            why_not=f"the step failed {why_not}" if why_not else "",
            timeout_s=world.timeout_s,
            uneven=self._mesh.uneven_groups,
        )
        if broken is None:
            return
        if broken.why_ended:
            self._ended = broken
        elif broken.is_reconnected and before is not None:
            self._begin_anew()
            before.restore()
        if is_of_others(error) and not broken.is_named:
            raise broken.error() from (error.__cause__ or error)

    def _require_connections(self) -> None:
        if self._ended is not None:
            raise self._ended.error()

    def _in_step(self) -> AbstractContextManager[None]:
        raise NotImplementedError

    def _record_state(self) -> _StepState:
        if self._state is None:
            self._state = _StepState(self.module, self._world)
        self._state.record()
        return self._state

    def _discard_gradients(self) -> None:
        start_over(self.module, self.plan)
        self.module.zero_grad(set_to_none=True)

    def _is_shortage_elsewhere(self, error: BaseException) -> bool:
        """Return True if contact was lost because another rank ran out of memory."""
        errors = (error, error.__cause__)
        is_lost = any(each is not None and is_lost_contact(each) for each in errors)
        return is_lost and self._world.size > 1 and is_shortage_announced()

    def _why_not_repeated(self, before: _StepState | None) -> str:
        """Return the reason why the step cannot be repeated; empty if it can."""
        if before is None:
            return "and nothing chooses another plan (`auto_parallelize` does)"
        if not self.plan.updates_in_step:
            return "and ranks that step at different times cannot agree on another plan"
        if self.plan.compression is not Compression.NONE:
            return "and compressed gradients remember what was sent in the step that broke off"
        is_cpu = self._world.device.type == "cpu"
        if self._world.size > 1 and not (is_cpu and is_reconnectable()):
            return "and groups of accelerators cannot be left in the middle of a step"
        changed = before.changed()
        return f"and the forward that broke off has changed the buffer `{changed}`" * bool(changed)

    def _recover(self, own: Shortage | None, *, is_last: bool) -> None:
        """Agree on what happened and on the next plan, and adopt it; all ranks call it."""
        world = self._world
        if world.size > 1:
            if own is not None:
                announce_shortage()
            close_all_connections()
        gc.collect()
        release_freed_memory()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
        text = own.model_dump_json() if own is not None else ""
        texts = texts_of_ranks("shortages of memory", text, world)
        shortages = [Shortage.build(json_object(text), where="a rank") for text in texts if text]
        worst = max(shortages, key=lambda shortage: shortage.needed_bytes)
        answer = self._answer(worst) if world.rank == 0 or world.size == 1 else None
        text = answer.model_dump_json() if answer is not None else ""
        text = texts_of_ranks("plan after a shortage", text, world)[0]
        answer = NextPlan.build(json_object(text), where="rank 0")
        if is_last or answer.plan is None or not self._can_adopt(answer.plan):
            because = f"for the {MOST_RETRIES + 1}rd time in this step" if is_last else ""
            raise self._shortage_error(worst, answer, because)
        if world.size > 1:
            reconnect(timeout_s=world.timeout_s)
        if world.rank == 0 or world.size == 1:
            log.warning(
                "step %d: %s; it is made again, and training goes on, with %s instead of %s: %s",
                self.step + 1,
                worst,
                _difference(answer.plan, self.plan),
                _difference(self.plan, answer.plan),
                answer.because,
            )
        self._adopt(answer.plan)

    def _answer(self, shortage: Shortage) -> NextPlan:
        if self.next_plan is None:
            return NextPlan(plan=None, because="")
        return self.next_plan(self.plan, shortage)

    def _can_adopt(self, plan: Plan) -> bool:
        """Return True if a model under the current plan can continue under `plan`."""
        update = {name: getattr(plan, name) for name in _ADJUSTABLE}
        is_other = plan.said(*_OF_RECOMPUTE) != self.plan.said(*_OF_RECOMPUTE)
        if is_other and (self.plan.compile or self.plan.offload is not Offload.NONE):
            return False  # both were built into the blocks
        return plan == self.plan.model_copy(update=update)

    def _adopt(self, plan: Plan) -> None:
        names = recomputed(plan, self._profile)
        if plan.recompute is self.plan.recompute:
            done = set(recomputed(self.plan, self._profile))
            names = [name for name in names if name not in done]
        recompute_blocks(self.module, names, plan)
        self.plan = plan
        self._begin_anew()
        self.steps.is_kept = True  # times of two plans say nothing of either

    def _begin_anew(self) -> None:
        """Forget a step that broke off in the middle of its exchanges; all ranks call it."""
        if isinstance(self._runner, DistributedDataParallel):
            forget_backward_underway(self._runner)
        self._cutter.follow(self.plan)

    def _shortage_error(self, shortage: Shortage, answer: NextPlan, because: str) -> ShortageError:
        hints = ["take a plan with a smaller microbatch_size and more accumulation, or recompute"]
        if answer.plan is not None:
            hints = [
                f"start again, from the last checkpoint if there is one: with `{answer.plan}`"
                " in place of what was decided"
            ]
        where = f"plan: {self.plan}" + f"\n{answer.because}" * bool(answer.because)
        what = f"step {self.step + 1}: {shortage}"
        return ShortageError(f"{what}, {because}" if because else what, where=where, hints=hints)


_OF_RECOMPUTE = ("recompute", "recompute_blocks")
_ADJUSTABLE = ("microbatch_size", "accumulation", *_OF_RECOMPUTE)
"""Settings of a plan that can change during a training."""


class _StepState:
    """State that a step reads and writes besides gradients."""

    def __init__(self, module: nn.Module, world: World) -> None:
        self._device = world.device
        statistics = running_statistics(module)
        self._statistics = list(statistics.values())
        buffers = module.named_buffers()
        self._others = {name: own for name, own in buffers if name not in statistics}

    def record(self) -> None:
        """Record it before a step."""
        self._random = random_states(self._device)
        self._before = [buffer.clone() for buffer in self._statistics]
        self._versions = [version_of(buffer) for buffer in self._others.values()]

    def changed(self) -> str:
        """Return the first buffer that was written to and cannot be restored; empty if none."""
        pairs = zip(self._others.items(), self._versions, strict=True)
        return next((name for (name, own), before in pairs if version_of(own) != before), "")

    def restore(self) -> None:
        restore_random_states(self._random, self._device)
        with torch.no_grad():
            for buffer, before in zip(self._statistics, self._before, strict=True):
                buffer.copy_(before)


def _difference(plan: Plan, other: Plan) -> str:
    """Return the settings of `plan` that differ in `other`."""
    names = [name for name in _ADJUSTABLE if getattr(plan, name) != getattr(other, name)]
    return " ".join(f"{name}={getattr(plan, name)}" for name in names)
