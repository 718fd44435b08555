"""What an optimizer keeps and moves, found by letting it step on a tiny parameter."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from engines.optimizer import OptimizerFactory
from profiles.errors import InputError
from profiles.operators import launches, moved_bytes
from profiles.torch_compat import (
    Operator,
    TorchDispatchMode,
    storage_of,
    tensors_in,
    tensors_written,
)
from profiles.workload import OPTIMIZERS, OptimizerProfile

_SHAPE = (64, 64)  # two-dimensional, as most weights are: Adafactor and Muon treat vectors apart


def optimizer_footprint(
    given: torch.optim.Optimizer | OptimizerFactory | None,
) -> OptimizerProfile:
    """Bytes that any optimizer or factory keeps and moves per element; None is AdamW.

    Two real steps on 4,096 elements: what is kept is counted after them, whatever the class, and
    what is moved during the second, operation by operation (the first makes the states).

    Raises:
        InputError: the factory does not use the parameters that it is given.
    """
    if given is None:
        return OPTIMIZERS["adamw"]
    parameter = nn.Parameter(torch.zeros(_SHAPE))
    parameter.grad = torch.ones(_SHAPE)
    optimizer = _trial(given, parameter)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(p is parameter for p in held):
        raise InputError(
            "the optimizer factory does not use the parameters that it is given",
            hints=["write `lambda params: torch.optim.AdamW(params, lr=3e-4)`"],
        )
    try:
        optimizer.step()
        with _Traffic() as traffic:
            optimizer.step()
    except TypeError as error:
        raise InputError(
            f"{type(optimizer).__name__} cannot step by itself: {error}",
            hints=["an optimizer that wants a closure does not fit `train_step`"],
        ) from None
    except RuntimeError:  # sparse gradients only, say: what it keeps is taken as Adam's
        return OPTIMIZERS["adam"].model_copy(update={"name": type(optimizer).__name__})
    kept = sum(
        value.numel() * value.element_size()
        for value in optimizer.state[parameter].values()
        if isinstance(value, Tensor) and value.dim() > 0
    )
    return OptimizerProfile(
        name=type(optimizer).__name__,
        state_bytes_per_element=kept / parameter.numel(),
        moved_bytes_per_element=traffic.moved_bytes / parameter.numel(),
    )


class _Traffic(TorchDispatchMode):
    """Adds up the bytes that operations read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved_bytes = 0

    def __torch_dispatch__(
        self, func: Operator, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        inputs = tensors_in((args, kwargs or {}))
        known = {id(storage_of(tensor)) for tensor in inputs}
        outputs = tensors_in(result)
        makes_storage = any(id(storage_of(tensor)) not in known for tensor in outputs)
        if launches(func, makes_storage=makes_storage):
            # Multi-tensor operations return nothing and write into their arguments.
            written = outputs or tensors_written(func, args, kwargs or {})
            self.moved_bytes += moved_bytes(func, inputs, written)
        return result


def _trial(
    given: torch.optim.Optimizer | OptimizerFactory, parameter: nn.Parameter
) -> torch.optim.Optimizer:
    """A second optimizer of the same settings that holds the tiny parameter only."""
    if not isinstance(given, torch.optim.Optimizer):
        return given([parameter])
    # Not copy.copy: Optimizer's own copying drops what subclasses keep beside groups and state.
    trial = object.__new__(type(given))
    trial.__dict__.update(given.__dict__)
    trial.state = defaultdict(dict)
    trial.param_groups = [{**given.param_groups[0], "params": [parameter]}]
    return trial
