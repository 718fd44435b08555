"""Optimizers on parameters that were replaced: carried over or built anew, and clipping."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from profiles.errors import InputError
from profiles.units import MIB

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Names = dict[nn.Parameter, str]


def names_of(model: nn.Module) -> Names:
    """Each parameter's first name; tied ones once."""
    return {parameter: name for name, parameter in model.named_parameters()}


def build_optimizer(
    given: torch.optim.Optimizer | OptimizerFactory | None,
    *,
    model: nn.Module,
    names_before: Names,
    kept: Container[str] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of the wrapped parameters.

    A factory is called on the trainable parameters of `model`. An optimizer that was built on the
    parameters before wrapping is carried over in place: same object, groups, hyper-parameters and
    states, so learning-rate schedulers that hold it go on working. None means AdamW with torch's
    defaults. `kept`: names of the parameters that this rank steps, where that is not all of them.

    Raises:
        InputError: the optimizer holds a parameter that is not of this model.
    """
    if isinstance(given, torch.optim.Optimizer):
        _carry_over(given, model, names_before)
        if kept is not None:
            _drop(given, {p for name, p in model.named_parameters() if name not in kept})
        return given
    trainable = [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (kept is None or name in kept)
    ]
    if not trainable and kept is not None:
        trainable = [nn.Parameter(torch.zeros(0))]  # optimizers refuse to be built on nothing
    return given(trainable) if given is not None else torch.optim.AdamW(trainable)


def _carry_over(optimizer: torch.optim.Optimizer, model: nn.Module, names: Names) -> None:
    for number, group in enumerate(optimizer.param_groups):
        strangers = [p for p in group["params"] if p not in names]
        if strangers:
            raise InputError(
                f"the optimizer holds a parameter of shape {tuple(strangers[0].shape)} that is not"
                " in the model",
                where=f"optimizer.param_groups[{number}]",
                hints=["build the optimizer on this model, or pass a factory: lambda params: ..."],
            )
        fresh = [model.get_parameter(names[old]) for old in group["params"]]
        for old, new in zip(group["params"], fresh, strict=True):
            state = optimizer.state.pop(old, None)
            if state:
                optimizer.state[new] = {
                    key: _like(value, old, new, group) if isinstance(value, Tensor) else value
                    for key, value in state.items()
                }
        group["params"] = fresh


def _drop(optimizer: torch.optim.Optimizer, others: set[nn.Parameter]) -> None:
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p not in others]
    for parameter in others:
        optimizer.state.pop(parameter, None)


def _like(value: Tensor, old: nn.Parameter, new: nn.Parameter, group: dict[str, object]) -> Tensor:
    """A state tensor laid out as the parameter now is; every rank holds the same values."""
    if value.dim() == 0:
        # Step counters live on the CPU, but for fused and capturable updates.
        return value.to(new.device) if group.get("fused") or group.get("capturable") else value
    if isinstance(new, DTensor) and not isinstance(value, DTensor):
        if value.shape != old.shape:
            raise InputError(
                f"an optimizer state of shape {tuple(value.shape)} belongs to a parameter of shape"
                f" {tuple(old.shape)}: it cannot be sharded with it",
                hints=["pass a factory, so that the states begin anew on the shards"],
            )
        local = value.to(new.device_mesh.device_type)
        shard = distribute_tensor(local, new.device_mesh, new.placements, src_data_rank=None)
        return shard.to(new.device)
    return value.to(new.device)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their global L2 norm is at most `max_norm`.

    Returns the norm before clipping, over all shards, the same on every rank.
    """
    norm = nn.utils.clip_grad_norm_(list(parameters), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The whole gradient of every parameter by name, on every rank; for looking and comparing.

    A collective call: all ranks must make it.
    """
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            found[name] = whole.detach().clone()
    return found


@torch.no_grad()
def send_from_rank_zero(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Make every rank's tensors equal to rank 0's."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if tensor.is_meta:
            continue  # every rank fills it from the same weights
        if any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)):
            continue  # expanded: several elements in one place, nothing can be written there
        bucket.append(tensor.detach())
        if sum(t.nbytes for t in bucket) >= BUCKET_BYTES:
            _broadcast(bucket, device)
            bucket = []
    _broadcast(bucket, device)


BUCKET_BYTES = 32 * MIB  # many small tensors in one message, and a copy that is never large


def _broadcast(tensors: list[Tensor], device: torch.device) -> None:
    """All of `tensors` in one message of bytes, whatever their dtypes."""
    if not tensors:
        return
    staged = torch.cat([_as_bytes(tensor).to(device) for tensor in tensors])
    dist.broadcast(staged, src=0)
    sizes = [tensor.nbytes for tensor in tensors]
    for tensor, part in zip(tensors, staged.split(sizes), strict=True):
        _write(tensor, part)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _write(tensor: Tensor, received: Tensor) -> None:
    """Write received bytes into `tensor`, in its own dtype, shape and place."""
    aligned = received.clone()  # a part of a message need not lie on the dtype's boundary
    tensor.copy_(aligned.view(tensor.dtype).reshape(tensor.shape))
