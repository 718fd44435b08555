"""This rank's tensors inside DTensors, without a call of torch; private names, each tested."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Step = Callable[..., Any]


def local_of(shard: DTensor, like: DTensor | None = None) -> Tensor | None:
    """The tensor in `shard`, the same object each time; None where it is no plain one (of a
    collective under way, or of torchao) or is not laid out as `like` is."""
    local = shard._local_tensor
    if type(local) is not Tensor:
        return None
    if like is not None:
        spec, other = shard._spec, like._spec
        if spec.placements != other.placements or spec.mesh != other.mesh:
            return None
        if local.dtype != like._local_tensor.dtype:
            return None
    return local


def shard_of(local: Tensor, like: DTensor) -> DTensor:
    """`local` as this rank's part of a tensor with the shape and layout of `like`.
    (`DTensor.from_local` would move it to the device of the mesh.)"""
    return DTensor(local, like._spec, requires_grad=False)


def without_torch_functions() -> Any:
    """Inside, tensors of subclasses are used, and their attributes are read, as plain ones."""
    return torch._C.DisableTorchFunctionSubclass()


def own_step(optimizer: torch.optim.Optimizer) -> Step | None:
    """The step of the optimizer's class without hooks; None where the object has another one, but
    for a scheduler's, which counts calls."""
    hooked = type(optimizer).step
    given = vars(optimizer).get("step")
    counts = getattr(given, "_wrapped_by_lr_sched", False)
    is_own = given is None or (counts and getattr(given, "__wrapped__", None) is hooked)
    if not is_own or not getattr(hooked, "hooked", False):
        return None
    return cast(Step, cast(Any, hooked).__wrapped__)


def replace_step(optimizer: torch.optim.Optimizer, step: Step) -> None:
    """Let `step(optimizer, ...)` be the step of this object, with the hooks and the profiler's
    mark of its class around it, and with the mark of a scheduler that saw its `own_step`."""
    given = vars(optimizer).get("step")

    def counted(this: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        cast(Any, this)._opt_called = True
        return step(this, *args, **kwargs)

    is_followed = given is not None
    hooked: Any = torch.optim.Optimizer.profile_hook_step(counted if is_followed else step)
    if is_followed:
        hooked._wrapped_by_lr_sched = True
    # A method, because schedulers wrap it.
    optimizer.step = hooked.__get__(optimizer)  # type: ignore[method-assign]
