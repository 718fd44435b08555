"""Replicas: every rank holds everything, gradients are averaged (DistributedDataParallel)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from engines.world import World
from profiles.errors import ModelError
from profiles.model import ModelProfile
from profiles.torch_compat import without_buffer_sync


def replicate(model: nn.Module, *, profile: ModelProfile, world: World) -> DistributedDataParallel:
    """Wrap `model` so that its backward averages gradients over all ranks.

    Gradients live in the communication buckets (no second copy). The graph is searched for unused
    parameters only where the profile saw some: the search costs time in every step.

    Raises:
        ModelError: nothing in the model is trainable.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            f"`{profile.name}` has no trainable parameter: there is nothing to train",
            hints=["set requires_grad on the parameters that should learn"],
        )
    return DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        init_sync=False,  # hybrid.py sends rank 0's parameters to every kind of plan
        # Running statistics are sent once a step by ParallelModel, not once a forward by DDP.
        **without_buffer_sync(),  # type: ignore[arg-type]
        gradient_as_bucket_view=True,
        find_unused_parameters=bool(profile.unused),
    )


def require_all_reduced(model: DistributedDataParallel, profile: ModelProfile) -> None:
    """After a backward: every parameter that DDP waits for has a gradient.

    Raises:
        ModelError: one was not used. Its bucket was not exchanged, so gradients are wrong, and
            DDP itself says so only in the next step.
    """
    if profile.unused:
        return  # DDP then looks for unused parameters itself
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            raise ModelError(
                f"`{name}` got no gradient in this step, it had one from the sample: DDP cannot"
                " tell which parameters a step uses",
                hints=[
                    "give a sample that leaves it unused too",
                    "or shard: `dp_shard` or `zero=1` exchange zeros for what a rank did not use",
                ],
            )


def autocast(device: torch.device, *, enabled: bool) -> torch.autocast:
    """The context that runs matmuls in bf16 on fp32 parameters."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)
