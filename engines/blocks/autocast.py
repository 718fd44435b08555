"""bf16 computation on fp32 parameters by autocast, for plans that shard nothing."""

from __future__ import annotations

import torch

from profiles.torch_compat import Tree, map_tensors


def autocast(device: torch.device, *, enabled: bool) -> torch.autocast:
    """The context that runs matmuls in bf16 on fp32 parameters."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


def as_fp32(output: Tree) -> Tree:
    """Cast outputs that autocast left in bf16 to fp32."""
    return map_tensors(lambda t: t.float() if t.dtype == torch.bfloat16 else t, output)
