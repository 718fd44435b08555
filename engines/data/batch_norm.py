"""Batch normalisation over the microbatches of all replicas together.

With it a data-parallel step equals the one-process step; without, every replica normalises its own
part, as plain DDP does.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.plan import Plan
from profiles.errors import BatchError
from profiles.torch_compat import is_batch_norm


def synchronise_batch_norms(
    model: nn.Module, device: torch.device, *, group: dist.ProcessGroup | None = None
) -> nn.Module:
    """Make every batch norm of `model` share its statistics over a group, or over all ranks.

    torch's SyncBatchNorm does it on GPUs. It refuses CPU tensors, so there the same arithmetic is
    written with differentiable all-reduces.
    """
    if device.type != "cpu":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
        return converted

    def forward(norm: nn.BatchNorm2d, value: Tensor) -> Tensor:
        return _forward(norm, value, group)

    for module in model.modules():
        if is_batch_norm(module):
            module.forward = MethodType(forward, module)  # type: ignore[method-assign]
    return model


@contextmanager
def explained_single_values() -> Iterator[None]:
    """Around a forward: explain torch's error about a batch norm over one value.

    Raises:
        BatchError: a channel has one value, which has no deviation to divide by.
    """
    try:
        yield
    except ValueError as error:
        if "Expected more than 1 value per channel" not in str(error):
            raise
        raise BatchError(
            "a batch norm got one value a channel: a microbatch of one row cannot be normalised",
            where=str(error).splitlines()[0],
            hints=[
                "plan with microbatch_size=2 or more, and give each rank as many rows",
                "drop the short batch: DataLoader(..., drop_last=True)",
                "or sync_batch_norm=true, over the rows of all replicas",
            ],
        ) from error


def warn_of_microbatches(model: nn.Module, plan: Plan) -> None:
    """Warn where a batch norm sees the batch of a step in microbatches.

    As with GPipe (arXiv:1811.06965, section 2.2) each microbatch is normalised on its own: a step
    differs from one over the whole batch, and running statistics move once a microbatch.

    Dividing by the deviation of few values (2 rows of 1 x 1 places) amplifies rounding without
    bound: in fp32 a split of layers, which sums in another order, then shows in the loss.
    """
    name = next(
        (path for path, m in model.named_modules() if is_batch_norm(m) and m.training), None
    )
    if name is None or plan.forwards == 1:
        return
    warnings.warn(
        f"`{name}` is a batch norm: it normalises each of the {plan.forwards} microbatches of a"
        " step on its own, and its running statistics move as often. A step differs from one over"
        " the whole batch, and over few values it amplifies rounding; microbatches=1"
        " accumulation=1, or a norm over features (GroupNorm, LayerNorm), does not",
        UserWarning,
        stacklevel=2,
    )


class _AllReduceSum(torch.autograd.Function):
    """y = sum of x over ranks on every rank; hence dL/dx = sum of dL/dy over ranks."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(gradients[0], ctx.group), None


def _forward(norm: nn.BatchNorm2d, value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Batch norm of `value`, (N, C, ...), with mean and variance over N and ... of the group."""
    if not norm.training:
        return type(norm).forward(norm, value)
    given, value = value.dtype, value.float()  # bf16 cannot count, nor average many values
    dims = [0, *range(2, value.dim())]
    shape = [1, -1] + [1] * (value.dim() - 2)
    count = torch.full((1,), value.numel() / value.shape[1], dtype=value.dtype)
    sums = torch.cat([value.sum(dims), count])
    total = _all_reduce(sums, group)
    mean, elements = total[:-1] / total[-1], total[-1]
    centred = value - mean.view(shape)
    variance = _all_reduce(centred.square().sum(dims), group) / elements
    if norm.track_running_stats and norm.running_mean is not None:
        _track(norm, mean.detach(), variance.detach(), elements.detach())
    result = centred * torch.rsqrt(variance + norm.eps).view(shape)
    if norm.affine:
        result = result * norm.weight.view(shape) + norm.bias.view(shape)
    return result.to(given)


def _all_reduce(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    result: Tensor = _AllReduceSum.apply(value, group)  # type: ignore[no-untyped-call]
    return result


def _track(norm: nn.BatchNorm2d, mean: Tensor, variance: Tensor, elements: Tensor) -> None:
    """Move the running statistics as torch does: unbiased variance, momentum or cumulative."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    factor = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean, factor)
    norm.running_var.lerp_(variance * (elements / (elements - 1)), factor)
