"""Checkpoints and state dicts: a part of ParallelModel."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engines.data.fsdp import release
from engines.optional.async_updates.exchange import UpdateExchange
from engines.plan import Plan
from engines.runtime.mesh import Mesh
from engines.runtime.world import World, rank_error_context
from engines.state import checkpoint
from engines.state.full_state import set_whole_state, whole_state
from engines.state.layout import Layout
from engines.state.optimizer import empty_optimizer, send_from_first
from profiles.model.profile import ModelProfile


class CheckpointMixin:
    """Checkpoints and state dicts: whole tensors under the names of the user's own module."""

    plan: Plan
    module: nn.Module
    optimizer: torch.optim.Optimizer
    _exchange: UpdateExchange
    _job: World
    _layout: Layout
    _mesh: Mesh
    _profile: ModelProfile
    _world: World

    @rank_error_context("saving")
    def save(self, path: checkpoint.PathLike) -> None:
        """Write weights and optimizer states to the folder `path`; all ranks call it.

        Any plan with any world size can load it. An interrupted save leaves the old folder.
        Replicas that update on their own average first; each writes its optimizer's states.
        """
        release(self.module)
        self._exchange.synchronise()
        self._follow_first_replica(every_buffer=True)
        with self._exchange.saving() as writers:
            if self._exchange.keeps_states:
                checkpoint.save(
                    path,
                    self.module,
                    self.optimizer,
                    world=self._job,
                    layout=self._layout,
                    writers=writers,
                    outer=self._exchange.outer_states(),
                    replica=self._exchange.states_of,
                )

    @rank_error_context("loading")
    def load(self, path: checkpoint.PathLike) -> None:
        """Read what `save` wrote under any plan; all ranks call it."""
        release(self.module)
        with self._exchange.loading():
            states = self.optimizer if self._exchange.keeps_states else empty_optimizer()
            has_outer = checkpoint.load(
                path,
                self.module,
                states,
                layout=self._layout,
                alone=bool(self.plan.servers),
                outer=self._exchange.outer_states(),
                replica=self._exchange.states_of,
            )
        if not has_outer:
            self._exchange.forget_outer_states()

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
        with self._exchange.loading():
            return set_whole_state(self.module, dict(state_dict), self._layout, strict=strict)

    def _follow_first_replica(self, *, every_buffer: bool = False) -> None:
        """Running statistics of batch norms follow the first replica's, as they do under plain DDP.

        Other buffers do so when a checkpoint is written: it has the first replica's.
        """
        has_statistics = bool(self._profile.batch_norms) and not self.plan.sync_batch_norm
        if self._mesh.replicas.size > 1 and (every_buffer or has_statistics):
            group = self._mesh.replicas.group
            send_from_first(self.module.buffers(), self._world.device, group=group)
