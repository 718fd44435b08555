"""What an optimizer keeps and moves, found by letting it step on a tiny parameter."""

from __future__ import annotations

import copy
from collections import defaultdict

import torch
from torch import Tensor, nn

from engines.optimizer import OptimizerFactory
from profiles.errors import InputError
from profiles.workload import OPTIMIZERS, OptimizerProfile

_SHAPE = (64, 64)  # two-dimensional, as most weights are: Adafactor and Muon treat vectors apart


def optimizer_footprint(
    given: torch.optim.Optimizer | OptimizerFactory | None,
) -> OptimizerProfile:
    """Bytes of state per element of any optimizer or factory; None is AdamW.

    One real step on 4,096 elements: what it keeps is counted, whatever its class. Moved bytes are
    the least a step can do: parameter and states read and written once, the gradient read, fp32.

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
    optimizer.step()
    kept = sum(
        value.numel() * value.element_size()
        for value in optimizer.state[parameter].values()
        if isinstance(value, Tensor) and value.dim() > 0
    )
    state_bytes = kept / parameter.numel()
    return OptimizerProfile(
        name=type(optimizer).__name__,
        state_bytes_per_element=state_bytes,
        moved_bytes_per_element=2 * (4 + state_bytes) + 4,
    )


def _trial(
    given: torch.optim.Optimizer | OptimizerFactory, parameter: nn.Parameter
) -> torch.optim.Optimizer:
    """A second optimizer of the same settings that holds the tiny parameter only."""
    if not isinstance(given, torch.optim.Optimizer):
        return given([parameter])
    trial = copy.copy(given)
    trial.state = defaultdict(dict)
    trial.param_groups = [{**given.param_groups[0], "params": [parameter]}]
    return trial
