"""Gradients of what replicas, or the ranks of the tp axis, have whole: they are the same on all.

Code of a user's own loop makes them differ: under tp it scales them by a norm of this rank's
parameters, of which ranks have other parts, and replicas exchange only those of a `backward()`.
Ranks would drift apart by a little in every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from engines.data.gradients import local_gradients
from engines.runtime.mesh import Axis
from profiles.errors import RankMismatchError

TOLERANCE = 1e-4
NARROW_TOLERANCE = 1e-2
"""Of gradients in 16 bits. Kernels of accelerators may add in another order on every rank."""
OVER_TP = (
    "clip by `parallel.clip_grad_norm_(max_norm)`, or `max_grad_norm=`: a norm of"
    " `parallel.parameters()` is that of this rank's parts",
    "`parallel.full_gradients()` has whole ones, for a norm or a rate of your own",
)
OVER_REPLICAS = (
    "call `loss.backward()`: gradients of `torch.autograd.grad` are those of this rank's rows",
    "scale gradients by what is the same on all ranks: `parallel.global_mean` of a loss, say",
)


@torch.no_grad()
def require_alike(
    whole: Iterable[tuple[str, nn.Parameter]],
    axis: Axis,
    *,
    device: torch.device,
    step: int,
    where: str,
    hints: Sequence[str],
) -> None:
    """Require that gradients of these parameters have one norm on all ranks of the axis, which call
    it together.

    Args:
        whole: parameters by name.
        device: of the ranks' messages; gradients may lie elsewhere.
        step, where, hints: the step that is about to be taken, who has them and what helps, for
            the error.

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
            f"gradients of what every rank {where} has whole differ between its ranks:"
            f" their norm is {least:.6g} to {largest:.6g}",
            where=f"step {step}",
            hints=hints,
        )
