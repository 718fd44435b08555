"""Optimizer states outside the device: a few parameters' at a time are there when they are stepped.

ZeRO-Offload (Ren et al., 2021, arXiv:2101.06840) steps on the processor and sends gradients and
parameters; FSDP2's `offload=states` does that for shards. Here the accelerator steps, any optimizer
as it is, and the states travel: for Adam in fp32 twice as many bytes, at the device's speed. Those
of shards that are in files (`engines.offload.shards`) are stepped where they are mapped.
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
from profiles.memory import release_freed_memory
from profiles.torch_compat import move_to, storage_of


class OffloadedStates:
    """States of `optimizer` live in `room` from now on; its steps fetch them, chunk by chunk.

    The optimizer stays the same object, groups and hyper-parameters too; learning-rate schedulers
    and checkpoints find it as it was. States without dimensions (step counters) stay where they
    are. `chunk_bytes`: parameters that are stepped together.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, room: OffloadPool, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._optimizer = optimizer
        self._room = room
        self._chunk_bytes = chunk_bytes
        self._homes: dict[nn.Parameter, dict[str, Tensor]] = {}
        own = optimizer.step

        @functools.wraps(own)
        def step(this: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self._step(own, closure)

        # A method, for schedulers put another one around it.
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.register_load_state_dict_post_hook(self._send_all_home)
        self._send_all_home()

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
            after=self._send_home,
        )
        if self._room.is_disk:
            # What came and went is free, but the C library keeps it: the point was to have less.
            release_freed_memory()
        return loss

    def _fetch(self, parameter: nn.Parameter) -> None:
        """States to where the parameter is; on a processor they are read where they are."""
        state = self._optimizer.state.get(parameter, {})
        for key, home in self._homes.get(parameter, {}).items():
            if state.get(key) is home and home.device != parameter.device:
                state[key] = home.to(parameter.device, non_blocking=self._room.is_pinned)

    @torch.no_grad()
    def _send_home(self, parameter: nn.Parameter) -> None:
        state = self._optimizer.state.get(parameter, {})
        homes = self._homes.setdefault(parameter, {})
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                continue
            local, home = local_part(value), homes.get(key)
            if not local.numel() or (home is not None and storage_of(local) is storage_of(home)):
                continue
            if local.device.type == "cpu" and not self._room.is_disk:
                continue  # in main memory already
            if home is None or home.shape != local.shape or home.dtype != local.dtype:
                home = homes[key] = self._room.tensor_like(local)
            home.copy_(local)
            if local is value:
                state[key] = home
            else:  # what is known of a shard stays, its memory is another
                move_to(value, home)

    def _send_all_home(self, *_: object) -> None:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                self._send_home(parameter)
