"""Steps of shards as the plain tensors that they are in a rank's memory.

Shards of FSDP2 are DTensors, and each of torch's operations on one takes the host tens of
microseconds. Optimizers that treat every element by itself need nothing from other ranks: inside
their steps, parameters, gradients and states are the rank's own tensors. torch then also takes
those in lists where it does so with plain tensors, as on accelerators.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from engines.state.compensated_adamw import CompensatedAdamW
from profiles.torch_compat.shards import (
    local_of,
    own_step,
    replace_step,
    shard_of,
    without_torch_functions,
)

# Read in torch 2.11 and 2.13, torch/optim: no norm, no factor, no number of all elements. Their
# states are of a parameter's shape, or numbers that all ranks have alike.
ELEMENTWISE = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
    CompensatedAdamW,
)

State = dict[str, Any]


def step_local_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Let `optimizer` step the rank's own tensors of its shards, if it has some and is one of
    `ELEMENTWISE`; True if so.

    Outside its step, and in its hooks, all is as before: parameters, gradients and states are
    shards. It steps shards one by one where a step has a closure, which looks at parameters, or is
    differentiated, and where a gradient is not laid out as its parameter is.
    """
    # Not subclasses, whose step may be another one.
    if type(optimizer) not in ELEMENTWISE or not _has_shards(optimizer):
        return False
    own = own_step(optimizer)
    if own is None:
        return False

    @functools.wraps(own)
    def step(this: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        parts = None if closure is not None or _is_special(this) else _Parts.of(this)
        return own(this, closure) if parts is None else parts.step(own)

    replace_step(optimizer, step)
    return True


def _has_shards(optimizer: torch.optim.Optimizer) -> bool:
    groups = optimizer.param_groups
    return any(isinstance(each, DTensor) for group in groups for each in group["params"])


def _is_special(optimizer: torch.optim.Optimizer) -> bool:
    """True of a step that is differentiated, compiled, or divided by torch's scaler of losses."""
    return (
        torch.compiler.is_compiling()
        or getattr(optimizer, "found_inf", None) is not None
        or any(group.get("differentiable") for group in optimizer.param_groups)
    )


class _Parts:
    """The rank's own tensors of an optimizer's parameters, for one step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups: list[tuple[dict[str, Any], list[Any], list[Any]]] = []
        self._shards: list[tuple[DTensor, Tensor]] = []
        self._gradients: list[tuple[DTensor, Tensor, Tensor]] = []
        self._states: defaultdict[Tensor, State] = defaultdict(dict)

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> _Parts | None:
        """None where a tensor is no plain one, or is not laid out as its parameter is."""
        parts = cls(optimizer)
        with without_torch_functions():
            return parts if parts._have_all() else None

    def _have_all(self) -> bool:
        known = self._optimizer.state
        for group in self._optimizer.param_groups:
            locals_: list[Tensor] = []
            for parameter in group["params"]:
                if not isinstance(parameter, DTensor):
                    locals_.append(parameter)
                    if parameter in known:
                        self._states[parameter] = known[parameter]
                    continue
                local = local_of(parameter)
                # Of a number, states of its shape and counters of steps look alike.
                if local is None or not local.dim():
                    return False
                locals_.append(local)
                self._shards.append((parameter, local))
                if not self._has_gradient(parameter, local) or not self._has_state(
                    parameter, local
                ):
                    return False
            self._groups.append((group, group["params"], locals_))
        return True

    def _has_gradient(self, parameter: DTensor, local: Tensor) -> bool:
        gradient = parameter.grad
        if gradient is None:
            return True
        own = local_of(gradient, parameter) if isinstance(gradient, DTensor) else None
        if own is None:
            return False
        self._gradients.append((parameter, local, own))
        return True

    def _has_state(self, parameter: DTensor, local: Tensor) -> bool:
        state: State | None = self._optimizer.state.get(parameter)
        if not state:
            return True
        mine = self._states[local]
        for key, value in state.items():
            if isinstance(value, DTensor):
                value = local_of(value, parameter)
                if value is None:
                    return False
            mine[key] = value
        return True

    def step(self, own: Callable[..., Any]) -> Any:
        """Step them; what an error leaves has no states that this step made."""
        optimizer = self._optimizer
        states = optimizer.state
        try:
            for group, _, locals_ in self._groups:
                group["params"] = locals_
            optimizer.state = self._states
            for _, local, gradient in self._gradients:
                local.grad = gradient
            result = own(optimizer)
        finally:
            for group, parameters, _ in self._groups:
                group["params"] = parameters
            optimizer.state = states
            for _, local, _ in self._gradients:
                local.grad = None
            # As an operation on a shard does; watchers of parameters compare versions.
            increment_version([parameter for parameter, _, _ in self._gradients])
        with without_torch_functions():
            self._keep_states(states)
        return result

    def _keep_states(self, states: dict[Any, State]) -> None:
        """Put what the step made into `states`, in the order of parameters."""
        of = {id(local): shard for shard, local in self._shards}
        for _, _, locals_ in self._groups:
            for local in locals_:
                mine, shard = self._states.get(local), of.get(id(local))
                if mine is None:
                    continue
                if shard is None:
                    states[local] = mine
                else:
                    _update(states[shard], mine, shard, local)


def _update(state: State, mine: State, shard: DTensor, local: Tensor) -> None:
    """Give `state` the values of `mine`, those of the parameter's shape as shards."""
    for key, value in mine.items():
        before = state.get(key)
        if before is value or (isinstance(before, DTensor) and local_of(before) is value):
            continue
        is_part = isinstance(value, Tensor) and value.shape == local.shape
        state[key] = shard_of(value, shard) if is_part else value
    for key in state.keys() - mine.keys():
        del state[key]
