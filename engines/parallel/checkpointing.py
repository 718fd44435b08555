"""Checkpoints and state dicts: a part of ParallelModel."""

from __future__ import annotations

import os
import warnings
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from engines.data.finite import FiniteGuard
from engines.data.fsdp import release
from engines.data.loader import ShardedLoader
from engines.data.replica_checksums import ReplicaChecksums, checksums
from engines.data.running_statistics import StatisticsBroadcast, running_statistics
from engines.optional.aggregation.hooks import PowerSGDBuckets
from engines.optional.async_updates.exchange import UpdateExchange
from engines.parallel.pretrained import PretrainedMixin
from engines.parallel.scheduling import SchedulingMixin
from engines.plan import Plan
from engines.runtime.broadcast import send_from_first
from engines.runtime.failures import all_ranks_succeed
from engines.runtime.mesh import Mesh
from engines.runtime.random_states import (
    random_states,
    require_random_states,
    restore_random_states,
)
from engines.runtime.world import World, rank_error_context, require_same, sum_over_ranks
from engines.state.checkpoint.agreement import Alone, all_peers_succeed, peers_of
from engines.state.checkpoint.averages import Averages
from engines.state.checkpoint.folder import require_retention
from engines.state.checkpoint.load import SavedStates, Step, fill, open_save
from engines.state.checkpoint.objects import Stateful, with_states
from engines.state.checkpoint.save import CheckpointSave, SaveOptions, start_saving
from engines.state.checkpoint.training_state import (
    StatesToLoad,
    require_savable,
    states_to_save,
)
from engines.state.full_state import set_whole_state, whole_state
from engines.state.layout import Layout
from engines.state.optimizer import empty_optimizer
from engines.state.optimizer_settings import EqualSettings
from profiles.errors import InputError, a_type
from profiles.model.profile import ModelProfile
from profiles.torch_compat import version_of
from profiles.torch_compat.ddp import bucket_order, hook_state, rebuild_buckets

PathLike = str | os.PathLike[str]


class CheckpointMixin(PretrainedMixin, SchedulingMixin):
    """Checkpoints and state dicts: whole tensors under the names of the user's own module.

    Attributes:
        step: optimizer steps of the training so far, those before a load included.
    """

    plan: Plan
    module: nn.Module
    _buffers_before: list[tuple[int, int, int]] | None = None
    _checksums: ReplicaChecksums
    _exchange: UpdateExchange
    _finite: FiniteGuard
    _has_changed_buffers: bool | None = None
    _job: World
    _layout: Layout
    _loaders: list[weakref.ref[ShardedLoader]]
    _mesh: Mesh
    _objects: dict[str, Stateful]
    _profile: ModelProfile
    _runner: Any
    _saving: CheckpointSave | None
    _settings: EqualSettings
    _statistics: StatisticsBroadcast
    _world: World

    def register(self, **objects: Stateful) -> None:
        """Save and load these too: schedulers, a loader, moving averages, whatever has a
        `state_dict` and a `load_state_dict`.

        Each rank saves its own state of them; but tensors under the names of parameters, in the
        shapes that those have on this rank, are saved whole as they are, so that averages go with
        any plan. Loaders that `shard` made are registered already.

        Raises:
            InputError: an object has no such methods.
        """
        for name, value in objects.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise InputError(
                    f"`{name}` is {a_type(value)}, without `state_dict` and `load_state_dict`",
                    where="parallel.register",
                )
            self._objects[name] = value

    def save(
        self, folder: PathLike, *, keep_last: int | None = None, keep_every: int | None = None
    ) -> Path:
        """Write a checkpoint into a new folder `step-...` in `folder`; all ranks call it.

        It holds weights, optimizer states, random states and PowerSGD's error feedback of each
        rank, the place in the data of loaders that `shard` made, and what is registered. Any plan
        with any world size can load it. The new folder gets its name when all of it is on the disk,
        so an interrupted save leaves the older ones as they are. Replicas that update on their own
        average first; each writes its optimizer's states.

        Args:
            keep_last: newest saves to retain; older ones are deleted after this one is complete.
                By default all are retained.
            keep_every: saves of steps that this divides are retained all the same.

        Returns the folder of this save.

        Raises:
            FileError: it cannot be written, or another job saves there.
            InputError: a registered object or the optimizer has a state that checkpoints cannot
                hold; or less than one save is to be retained.
            NonFiniteError: a trained parameter is nan or inf; nothing is written.
            RankMismatchError: replicas' parameters or ranks' rates differ; nothing is written.
            PlanMismatchError: ranks name different folders.
        """
        return self._start_save(folder, keep_last, keep_every, background=False).wait()

    def async_save(
        self, folder: PathLike, *, keep_last: int | None = None, keep_every: int | None = None
    ) -> CheckpointSave:
        """As `save`, but copy the states to host memory and return; a thread writes them.

        `wait()` of the result returns the folder, or raises what went wrong; the next save and the
        next load wait for it themselves.
        """
        return self._start_save(folder, keep_last, keep_every, background=True)

    @rank_error_context("saving")
    def _start_save(
        self,
        folder: PathLike,
        keep_last: int | None,
        keep_every: int | None,
        *,
        background: bool,
        timeout_s: float | None = None,
    ) -> CheckpointSave:
        """`timeout_s`: for other ranks, beyond what the disk takes; by default the job's."""
        require_retention(keep_last=keep_last, keep_every=keep_every)
        job = self._job if timeout_s is None else replace(self._job, timeout_s=timeout_s)
        root = Path(os.path.abspath(folder))
        self._finish_save()
        require_same("checkpoint folder", f"{root.name} {root}", job)
        step = self.step
        with all_ranks_succeed("reading what is registered", timeout_s=job.timeout_s):
            own = self._own_states()
        release(self.module)
        self._exchange.synchronise()
        self._follow_first_replica(every_buffer=True)
        self._finite.require_savable(self._job)
        self._checksums.require_equal(step)
        self._settings.require_equal(step)
        with self._exchange.saving() as writers, self._probing():
            if not self._exchange.keeps_states:
                return CheckpointSave.done(root / f"step-{step:08d}")
            peers = peers_of(self._job, writers)
            with all_peers_succeed(peers, f"saving into `{root}`"):
                require_savable(self.optimizer)
            states = states_to_save(
                self.module,
                self.optimizer,
                self._layout,
                outer=self._exchange.outer_states(),
                replica=self._exchange.states_of,
            )
            own["objects"], averages = Averages(self.module, self._layout).take_from(
                own["objects"], peers=peers, checksums=self._checksums_of
            )
            states.tensors.update(averages)
            self.step = step  # servers step while others come to save
            saving = start_saving(
                root,
                states,
                own,
                peers=peers,
                options=SaveOptions(step, str(self.plan), keep_last, keep_every),
                timeout_s=job.timeout_s,
                background=background and writers is None,
            )
        self._saving = saving
        return saving

    def _finish_save(self) -> None:
        """Wait for a save in the background, and raise what went wrong in it, once."""
        saving, self._saving = self._saving, None
        if saving is not None and not saving.was_waited_for:
            saving.wait()

    @rank_error_context("loading")
    def load(self, folder: PathLike, *, step: Step = "newest", verify: bool = True) -> int:
        """Read what `save` wrote under any plan; all ranks call it.

        Files are compared with their hashes before anything is changed. Random states are restored
        where as many ranks saved as there are now; others go on with theirs, and dropout draws
        other numbers than the undisturbed run. PowerSGD's error feedback is restored under the plan
        that has the same buckets; else it begins at zero, with a warning.

        Args:
            folder: that `save` was given, or one of the `step-...` folders in it.
            step: of the save; "newest": the last one; "latest": the last one that is whole, with a
                warning where a newer one is damaged.
            verify: False compares sizes alone.

        Returns the step of the training that was loaded.

        Raises:
            FileError: there is no complete checkpoint, it is damaged, or of another model or
                optimizer; nothing was changed.
        """
        root = Path(os.path.abspath(folder))
        self._finish_save()
        require_same("checkpoint folder", f"{root.name} {root}", self._job)
        release(self.module)
        # Ranks that servers exchange with have the whole model each, and load without the others.
        everyone = Alone(self._job.rank) if self.plan.servers else peers_of(self._job, None)
        saved = open_save(root, step=step, peers=everyone, verify=verify)
        with all_peers_succeed(everyone, f"loading `{saved.path}`"):
            own = self._own_of(saved)
            states_of = self._objects_of(saved, own)
            Averages(self.module, self._layout).put_into(states_of, saved)
        objects = with_states(states_of, peers=everyone, folder=saved.path)
        with objects, self._loading(), self._probing():
            states = StatesToLoad(
                self.module,
                self.optimizer if self._exchange.keeps_states else empty_optimizer(),
                self._layout,
                outer=self._exchange.outer_states(),
            )
            has_outer = fill(saved, states, peers=everyone, replica=self._exchange.states_of)
        if not has_outer:
            self._exchange.forget_outer_states()
        self.step = saved.step
        self._restore_own(saved, own)
        return self.step

    def _own_states(self) -> dict[str, Any]:
        """Random states and objects of this rank."""
        objects = {name: value.state_dict() for name, value in self._objects.items()}
        loaders = [loader.state_dict() for loader in self._live_loaders()]
        feedback = self._feedback
        return {
            "feedback": feedback.state_dict() if feedback is not None else None,
            "random": random_states(self._world.device),
            "buckets": bucket_order(self._runner) if self._has_buckets else [],
            "loaders": loaders,
            "objects": objects,
        }

    def _checksums_of(self, tensors: list[Tensor]) -> list[int]:
        return checksums(tensors, self._world.device).tolist() if tensors else []

    @property
    def _has_buckets(self) -> bool:
        return isinstance(self._runner, DistributedDataParallel) and not self._world.is_fake

    @property
    def _feedback(self) -> PowerSGDBuckets | None:
        """State of a compression that adds what a step drops to the next."""
        state = hook_state(self._runner) if self._has_buckets else None
        return state if isinstance(state, PowerSGDBuckets) else None

    def _live_loaders(self) -> list[ShardedLoader]:
        """Those that `shard` made and the script still has, in their order."""
        every = [loader for reference in self._loaders if (loader := reference()) is not None]
        if len(every) < len(self._loaders):
            self._loaders = [weakref.ref(loader) for loader in every]
        return every

    def _iterated_loaders(self) -> list[ShardedLoader]:
        """Those of them that are in the middle of a pass."""
        return [loader for loader in self._live_loaders() if loader.is_in_pass]

    def _own_of(self, saved: SavedStates) -> dict[str, Any]:
        """Random states and objects of this rank, or of the first where ranks differ.

        Raises FileError: they are none, as in a file that was changed.
        """
        is_same = saved.world_size == self._job.size
        own = saved.of_rank(self._job.rank if is_same else 0)
        if is_same and "random" in own:
            require_random_states(own["random"], self._world.device)
        return own

    def _objects_of(
        self, saved: SavedStates, own: dict[str, Any]
    ) -> dict[str, tuple[Stateful, dict[str, Any]]]:
        """Loaders and registered objects, with their states in the checkpoint."""
        every: dict[str, tuple[Stateful, dict[str, Any]]] = {}
        loaders = zip(self._live_loaders(), own.get("loaders", ()), strict=False)
        for number, (loader, state) in enumerate(loaders, 1):
            every[f"loader {number}"] = loader, state
        objects = own.get("objects", {})
        for name, value in self._objects.items():
            if name in objects:
                every[name] = value, objects[name]
            elif self._job.rank == 0:
                warnings.warn(f"`{saved.path}` has no `{name}`: it begins anew", stacklevel=4)
        return every

    def _restore_own(self, saved: SavedStates, own: dict[str, Any]) -> None:
        """Restore random states and the error feedback, once the tensors are read."""
        if self._has_buckets and own.get("buckets"):
            # The order of additions, and so the last bits of sums, follow the buckets.
            rebuild_buckets(self._runner, own["buckets"])
        self._restore_feedback(saved, own)
        if saved.world_size == self._job.size and "random" in own:
            restore_random_states(own["random"], self._world.device)

    def _restore_feedback(self, saved: SavedStates, own: dict[str, Any]) -> None:
        """Restore the error feedback of this rank, or say why it begins at zero."""
        feedback, state = self._feedback, own.get("feedback")
        if feedback is None and state is None:
            return
        if feedback is None:
            why = "this plan compresses no gradients by factors"
        elif state is None:
            why = "the checkpoint has none"
        elif saved.world_size != self._job.size:
            why = f"{saved.world_size} ranks saved it, these are {self._job.size}"
        elif bucket_order(self._runner) != own.get("buckets") or not feedback.load_state_dict(
            state, self._world.device
        ):
            why = "gradients are in other buckets, or their factors of another rank"
        else:
            return
        if self._job.rank == 0:
            warnings.warn(
                f"PowerSGD's error feedback in `{saved.path}` is left out: {why}", stacklevel=5
            )

    @rank_error_context("gathering the state")
    def state_dict(
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Whole tensors under the unwrapped model's names, on every rank; all ranks call it.

        Needs the memory of the whole model; `save` does not. `keep_vars` has no meaning for tensors
        that are gathered here.
        """
        release(self.module)
        self._exchange.synchronise()
        self._follow_first_replica(every_buffer=True)
        state = destination if destination is not None else {}
        for name, value in whole_state(self.module, self._layout).items():
            state[prefix + name] = value
        return state

    @rank_error_context("distributing the state")
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load whole tensors, the same on every rank, as the unwrapped model would."""
        release(self.module)
        with self._loading():
            return set_whole_state(self.module, dict(state_dict), self._layout, strict=strict)

    def _follow_first_replica(self, *, in_step: bool = False, every_buffer: bool = False) -> None:
        """Buffers that forwards change follow the first replica's, as they do under plain DDP:
        running statistics of batch norms, which a step sends by itself (`StatisticsBroadcast`),
        and others from the second step on.

        Those that nothing was seen to change do so when a checkpoint is written.
        """
        has_changed = every_buffer or bool(self._has_changed_buffers)
        has_changed |= not in_step and self._statistics.is_on
        if self._buffers_before is None:
            self._buffers_before = self._other_buffers()
        if self._mesh.replicas.size > 1 and has_changed:
            group = self._mesh.replicas.group
            send_from_first(self.module.buffers(), self._world.device, group=group)

    def _note_changed_buffers(self) -> None:
        """After the first forwards: ask all ranks if one changed a buffer that is no statistic."""
        before = self._buffers_before
        if self._has_changed_buffers is not None or not before:
            return
        is_changed = before != self._other_buffers()
        is_asked = self._mesh.replicas.size > 1 and not self._world.is_fake
        sums = sum_over_ranks([float(is_changed)], self._world) if is_asked else [0.0]
        self._has_changed_buffers = sums[0] > 0

    def _other_buffers(self) -> list[tuple[int, int, int]]:
        """The buffers besides those of batch norms, how often they were written to, and checksums:
        kernels that follow ranges, for quantisation, write to them without a count."""
        statistics = set(map(id, running_statistics(self.module).values()))
        buffers = [b for b in self.module.buffers() if id(b) not in statistics]
        sums = checksums(buffers, self._world.device).tolist() if buffers else []
        return [(id(b), version_of(b), total) for b, total in zip(buffers, sums, strict=True)]
