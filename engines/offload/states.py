"""Optimizer states outside the device: steps fetch those of a few parameters at a time.

ZeRO-Offload (Ren et al., 2021, arXiv:2101.06840) steps on the processor and sends gradients and
parameters; FSDP2's `offload=states` does that for shards. Here the accelerator steps, with any
optimizer, and the states are sent: for Adam in fp32 twice as many bytes, at the device's speed.
Those of shards in files (`engines.offload.shards`) are stepped where they are mapped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from engines.data.replicas import local_part
from engines.offload.pool import OffloadPool
from engines.plan import CHUNK_BYTES
from engines.state.chunked_step import step_in_chunks
from profiles.allocator.process_peak import release_freed_memory
from profiles.torch_compat import move_to, storage_of


class OffloadedStates:
    """Keep the states of `optimizer` in `pool`; its steps fetch them, chunk by chunk.

    The optimizer stays the same object, groups and hyper-parameters too; learning-rate schedulers
    and checkpoints work as before. States without dimensions (step counters) stay where they
    are. `chunk_bytes`: parameters that are stepped together.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, pool: OffloadPool, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._optimizer = optimizer
        self._pool = pool
        self._chunk_bytes = chunk_bytes
        self._stored: dict[nn.Parameter, dict[str, Tensor]] = {}
        own = optimizer.step

        @functools.wraps(own)
        def step(this: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self._step(own, closure)

        # A method, because schedulers wrap it.
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.register_load_state_dict_post_hook(self._store_all)
        self._store_all()

    def _step(self, own: Callable[[], Any], closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step_in_chunks(
            self._optimizer,
            own,
            chunk_bytes=self._chunk_bytes,
            before=self._fetch,
            after=self._store,
        )
        if self._pool.is_disk:
            # The C library keeps freed memory: give it back, to use less is the point.
            release_freed_memory()
        return loss

    def _fetch(self, parameter: nn.Parameter) -> None:
        """Copy states to the parameter's device; on a processor they are used where they are."""
        state = self._optimizer.state.get(parameter, {})
        for key, stored in self._stored.get(parameter, {}).items():
            if state.get(key) is stored and stored.device != parameter.device:
                state[key] = stored.to(parameter.device, non_blocking=self._pool.is_pinned)

    @torch.no_grad()
    def _store(self, parameter: nn.Parameter) -> None:
        state = self._optimizer.state.get(parameter, {})
        homes = self._stored.setdefault(parameter, {})
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                continue
            local, stored = local_part(value), homes.get(key)
            if not local.numel() or (
                stored is not None and storage_of(local) is storage_of(stored)
            ):
                continue
            if local.device.type == "cpu" and not self._pool.is_disk:
                continue  # in main memory already
            if stored is None or stored.shape != local.shape or stored.dtype != local.dtype:
                stored = homes[key] = self._pool.tensor_like(local)
            stored.copy_(local)
            if local is value:
                state[key] = stored
            else:  # a shard keeps its description and gets other memory
                move_to(value, stored)

    def _store_all(self, *_: object) -> None:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                self._store(parameter)
