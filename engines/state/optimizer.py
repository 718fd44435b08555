"""Optimizers on replaced parameters: carried over or built anew."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engines.state.layout import Layout
from engines.state.parameter_groups import groups_of_whole, regroup
from profiles.errors import InputError
from profiles.torch_compat import with_hooks

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
ParameterNames = dict[nn.Parameter, str]


def names_of(model: nn.Module) -> ParameterNames:
    """Each parameter's first name; tied ones once."""
    return {parameter: name for name, parameter in model.named_parameters()}


def build_optimizer(
    given: torch.optim.Optimizer | OptimizerFactory | None,
    *,
    model: nn.Module,
    names_before: ParameterNames,
    layout: Layout,
    served: frozenset[str] | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer of this rank's parameters after the plan was applied.

    A factory is called on the trainable parameters of `model`, and its groups are those that it
    makes of the whole model's. An optimizer that was built on the parameters before wrapping is
    carried over in place: same object, groups, hyper-parameters and states, so learning-rate
    schedulers that refer to it still work. None means AdamW with torch's defaults. That of a server
    has the parameters named in `served` alone.

    Raises:
        InputError: the optimizer holds a parameter that is not of this model.
    """
    if isinstance(given, torch.optim.Optimizer):
        _carry_over(given, model, names_before, layout, served)
        return with_hooks(given)
    own = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and layout.holds(name) and (served is None or name in served)
    }
    trainable = list(own.values())
    if not trainable and layout.has_stages:
        trainable = [_empty_parameter()]
    if given is None:
        return torch.optim.AdamW(trainable)
    groups = groups_of_whole(given, names_before, layout) if own and served is None else None
    optimizer = with_hooks(given(trainable))
    if groups is not None:
        regroup(optimizer, groups, own)
    return optimizer


def empty_optimizer() -> torch.optim.Optimizer:
    """An optimizer that steps no parameter of any model."""
    return torch.optim.SGD([_empty_parameter()])


def _empty_parameter() -> nn.Parameter:
    """Optimizers refuse to be built on no parameters at all."""
    return nn.Parameter(torch.zeros(0))


def _carry_over(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    names: ParameterNames,
    layout: Layout,
    served: frozenset[str] | None,
) -> None:
    for number, group in enumerate(optimizer.param_groups):
        strangers = [p for p in group["params"] if p not in names]
        if strangers:
            raise InputError(
                f"the optimizer holds a parameter of shape {tuple(strangers[0].shape)} that is not"
                " in the model",
                where=f"optimizer.param_groups[{number}]",
                hints=["build the optimizer on this model, or pass a factory: lambda params: ..."],
            )
        fresh = []
        for old in group["params"]:
            name, state = names[old], optimizer.state.pop(old, None)
            if not layout.holds(name) or (served is not None and name not in served):
                continue
            new = model.get_parameter(name)
            fresh.append(new)
            if state:
                optimizer.state[new] = {
                    key: _like(value, name, new, layout, group) for key, value in state.items()
                }
        group["params"] = fresh


def _like(
    value: object, name: str, new: nn.Parameter, layout: Layout, group: dict[str, object]
) -> object:
    """A state laid out as the parameter `name` now is; all ranks have the same values."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0:
        # Step counters live on the CPU, but for fused and capturable updates.
        return value.to(new.device) if group.get("fused") or group.get("capturable") else value
    whole = layout.shape(name)
    if value.shape == whole:
        return layout.part(name, value, like=new).to(new.device)
    if isinstance(new, DTensor) or new.shape != whole:
        raise InputError(
            f"an optimizer state of shape {tuple(value.shape)} belongs to a parameter of shape"
            f" {tuple(whole or ())}: it cannot be split like it",
            hints=["pass a factory, so that the states begin anew on the parts"],
        )
    return value.to(new.device)
