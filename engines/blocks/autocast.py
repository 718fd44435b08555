"""16-bit computation on fp32 parameters by autocast, for plans that shard nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from profiles.torch_compat import Tree, map_tensors
from profiles.torch_compat.grouped import autocast_grouped_products


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """The context that runs matmuls in `dtype` on fp32 parameters, those of experts too; None: that
    does nothing, and leaves the autocast of a user's own loop on."""
    if dtype is None:
        return nullcontext()
    autocast_grouped_products()
    return torch.autocast(device.type, dtype=dtype)


def keep_dtype(module: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    """Let autocast compute `module` in `dtype` in any thread: nn.DataParallel's enable it there in
    the thread's own default, which is float16 on CUDA."""

    def set_dtype(*_: object) -> None:
        torch.set_autocast_dtype(device_type, dtype)

    module.register_forward_pre_hook(set_dtype)


def as_fp32(output: Tree, dtype: torch.dtype | None) -> Tree:
    """Cast outputs that autocast left in `dtype` to fp32."""
    if dtype is None:
        return output
    return map_tensors(lambda t: t.float() if t.dtype == dtype else t, output)
