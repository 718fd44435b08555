"""Shards of FSDP2 in files: parameters from the start on, gradients as they are reduced.

FSDP2's own offload to main memory (`CPUOffloadPolicy`) stays as it is: gathers copy from there, the
step runs there. Its main memory are mapped files here. ZeRO-Infinity (Rajbhandari et al.,
2021, arXiv:2104.07857) reads ahead by asynchronous calls and buffers of its own; here the kernel
reads and writes pages, and keeps those in main memory that fit.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from engines.data.replicas import local_part
from engines.offload.pool import OffloadPool
from profiles.torch_compat import move_to, storage_of
from profiles.torch_compat.fsdp import move_shards


def offload_shards(module: FSDPModule, pool: OffloadPool) -> None:
    """Move the shards that FSDP2 made of `module` into `pool`; their gradients follow from now on.

    Raises:
        InputError: the disk has no space for them.
    """

    def stored_like(flat: Tensor) -> Tensor:
        return pool.tensor_like(flat).copy_(flat) if flat.numel() else flat

    for parameter in move_shards(module, stored_like):
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_Gradient(pool))


class _Gradient:
    """Moves one parameter's gradient when it is reduced; that of the next step replaces it."""

    def __init__(self, pool: OffloadPool) -> None:
        self._pool = pool
        self._stored: Tensor | None = None

    @torch.no_grad()
    def __call__(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is None or not (local := local_part(gradient)).numel():
            return
        stored = self._stored
        if stored is None or stored.shape != local.shape or stored.dtype != local.dtype:
            stored = self._stored = self._pool.tensor_like(local)
        if storage_of(local) is not storage_of(stored):  # else it was accumulated in place
            stored.copy_(local)
            move_to(gradient, stored)
