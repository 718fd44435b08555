"""Shards of FSDP2 in files: parameters from the start on, gradients as they are reduced.

FSDP2's own way to main memory (`CPUOffloadPolicy`) stays as it is: gathers copy from there, the
step runs there. What it takes for main memory are mapped files. ZeRO-Infinity (Rajbhandari et al.,
2021, arXiv:2104.07857) reads ahead by asynchronous calls and buffers of its own; here the kernel
reads and writes pages, and what main memory has pool for stays in it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from engines.data.replicas import local_part
from engines.offload.pool import OffloadPool
from profiles.torch_compat import move_to, storage_of
from profiles.torch_compat_fsdp import move_shards


def offload_shards(module: FSDPModule, pool: OffloadPool) -> None:
    """Move what FSDP2 has cut for `module` into `pool`; gradients of it follow from now on.

    Raises:
        InputError: the disk has no room for them.
    """

    def home_of(flat: Tensor) -> Tensor:
        return pool.tensor_like(flat).copy_(flat) if flat.numel() else flat

    for parameter in move_shards(module, home_of):
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_Gradient(pool))


class _Gradient:
    """Moves one parameter's gradient when it is reduced; the next step's takes its place."""

    def __init__(self, pool: OffloadPool) -> None:
        self._pool = pool
        self._home: Tensor | None = None

    @torch.no_grad()
    def __call__(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is None or not (local := local_part(gradient)).numel():
            return
        home = self._home
        if home is None or home.shape != local.shape or home.dtype != local.dtype:
            home = self._home = self._pool.tensor_like(local)
        if storage_of(local) is not storage_of(home):  # else it was added up where it is
            home.copy_(local)
            move_to(gradient, home)
