"""Optimizers' steps on shards: a trial before any work is done.

Shards of FSDP2 are DTensors. torch has no rule for some operations on them.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from profiles.errors import PlanError


def require_steps_shards(optimizer: torch.optim.Optimizer, *, plan: object) -> None:
    """Step copies of the smallest shards, one of each number of dimensions.

    All ranks of a shard call it: a step may gather.

    Raises:
        PlanError: the step is not possible.
    """
    copies = [_copy(parameter) for parameter in _smallest(optimizer)]
    if not copies:
        return
    trial = trial_of(optimizer, copies)
    try:
        with torch.random.fork_rng(devices=[]):
            trial.step()
    except Exception as error:
        name = type(optimizer).__name__
        raise PlanError(
            f"`{name}` cannot step shards: {type(error).__name__}:"
            f" {str(error).splitlines()[0] if str(error) else ''}",
            where=f"plan: {plan}",
            hints=["replicate (dp_replicate without zero), or take an optimizer such as AdamW"],
        ) from error


def trial_of(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """A second optimizer of the settings of the first group, with `parameters` alone.

    Not copy.copy: Optimizer's own copying drops subclasses' attributes besides groups and state.
    """
    trial = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        # A scheduler sets a `step` of the real optimizer; hooks must not see a trial.
        if name != "step":
            vars(trial)[name] = type(value)() if name.endswith("_hooks") else value
    trial.state = defaultdict(dict)
    trial.param_groups = [{**optimizer.param_groups[0], "params": parameters}]
    return trial


def _smallest(optimizer: torch.optim.Optimizer) -> list[Any]:
    smallest: dict[int, DTensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, DTensor) and not parameter.is_meta:
                known = smallest.get(parameter.dim())
                if known is None or parameter.numel() < known.numel():
                    smallest[parameter.dim()] = parameter
    return [smallest[dims] for dims in sorted(smallest)]


def _copy(parameter: nn.Parameter) -> nn.Parameter:
    copy = nn.Parameter(parameter.detach().clone())
    copy.grad = torch.ones_like(copy)
    return copy
