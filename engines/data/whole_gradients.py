"""Gradients of what every rank of the tp axis has whole: they are the same on all of them.

Code of a user's own loop that scales them by a norm of this rank's parameters makes them differ:
ranks have other parts of split layers. They would drift apart by a little in every step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from engines.data.gradients import local_gradients
from engines.runtime.mesh import Axis
from profiles.errors import RankMismatchError

TOLERANCE = 1e-4
NARROW_TOLERANCE = 1e-2
"""Of gradients in 16 bits. Kernels of accelerators may add in another order on every rank."""


@torch.no_grad()
def require_alike(
    whole: Iterable[tuple[str, nn.Parameter]], axis: Axis, *, device: torch.device, step: int
) -> None:
    """Require that gradients of these parameters have one norm on all ranks of the axis, which call
    it together.

    Args:
        whole: parameters by name.
        device: of the ranks' messages; gradients may lie elsewhere.
        step: that is about to be taken, for the error.

    Raises:
        RankMismatchError: on all ranks of the axis.
    """
    gradients = list(local_gradients(whole).values())
    norm = nn.utils.get_total_norm(gradients).to(device, torch.float32)
    extremes = torch.stack([norm, -norm])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=axis.group)
    largest, least = extremes[0].item(), -extremes[1].item()
    is_narrow = any(gradient.dtype.itemsize < 4 for gradient in gradients)
    if largest - least > (NARROW_TOLERANCE if is_narrow else TOLERANCE) * largest:
        raise RankMismatchError(
            "gradients of what every rank of the tp axis has whole differ between its ranks:"
            f" their norm is {least:.6g} to {largest:.6g}",
            where=f"step {step}",
            hints=[
                "clip by `parallel.clip_grad_norm_(max_norm)`, or `max_grad_norm=`: a norm of"
                " `parallel.parameters()` is that of this rank's parts",
                "`parallel.full_gradients()` has whole ones, for a norm or a rate of your own",
            ],
        )
