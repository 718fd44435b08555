"""Arguments of `advise` and `auto_parallelize`, in their plain forms."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from os import PathLike

import torch
from torch import nn

from engines.state.compensated_adamw import CompensatedAdamW
from engines.state.deferred import deferred
from engines.state.optimizer import OptimizerFactory
from profiles.capture.subject import require_module
from profiles.errors import InputError, ModelError, UnknownNameError, a_type
from profiles.machine.cluster import ClusterProfile
from profiles.machine.clusters import resolve_cluster

ModelLike = nn.Module | Callable[[], nn.Module]
FLAGS = {"timed", "allow_lossy", "allow_stale", "learns", "anchors", "measure_noise"}
NUMBERS = {
    "global_batch_size",
    "samples",
    "critical_batch_size",
    "host_overhead_s",
    "imbalance",
    "max_grad_norm",
    "seed",
    "check_replicas_every",
}
OptimizerLike = torch.optim.Optimizer | OptimizerFactory | str | None


def module_of(model: ModelLike) -> nn.Module:
    """A module, or what a function without arguments builds under `deferred()`.

    Raises:
        ModelError: it is something else, or the function cannot be called so.
    """
    if isinstance(model, nn.Module):
        return model
    try:
        inspect.signature(model).bind()
    except TypeError as error:
        raise ModelError(
            f"the model's function wants arguments: {error}",
            hints=["give one without: `lambda: Model(config)`"],
        ) from None
    with deferred():
        made: object = model()
    if not isinstance(made, nn.Module):
        raise ModelError(f"the model's function returns {a_type(made)}, no torch.nn.Module")
    require_module(made)
    return made


def require_callables(model: object, loss_fn: object) -> None:
    """Require a module whose shapes are known or a function, and a loss that can be called.

    Raises:
        ModelError, InputError: they are something else.
    """
    if isinstance(model, nn.Module) or not callable(model):
        require_module(model)
    if loss_fn is not None and not callable(loss_fn):
        raise InputError(
            f"loss_fn is {a_type(loss_fn)}, it must be callable: loss_fn(output, target)",
            hints=["give a function or a module, or leave it out if the model returns its loss"],
        )


def require_path(given: object, name: str, meaning: str) -> None:
    """Require the path of a file or folder, or none.

    Raises:
        InputError: it is something else.
    """
    if given is not None and not isinstance(given, str | PathLike):
        raise InputError(f"{name} is {a_type(given)}", hints=[f"give a path: {meaning}"])


def require_kinds(given: Mapping[str, object]) -> None:
    """Require numbers that are no booleans, which Python takes for 0 or 1, and flags that are no
    text, of which any is true, "no" too.

    Args:
        given: arguments by name; of others nothing is required.

    Raises:
        InputError: one is of the other kind.
    """
    for name, value in given.items():
        if name in NUMBERS and isinstance(value, bool):
            raise InputError(f"`{name}` wants a number, not {value}")
        if name in FLAGS and not hasattr(value, "__bool__"):
            raise InputError(f"`{name}` is {a_type(value)}, it must be True or False")


def optimizer_of(given: OptimizerLike) -> torch.optim.Optimizer | OptimizerFactory | None:
    """An optimizer, a factory, or torch's of that name with its default settings, or ours.

    Raises:
        UnknownNameError: neither has one of that name.
        InputError: it is something else.
    """
    if isinstance(given, str):
        known = {
            name.lower(): kind
            for name, kind in vars(torch.optim).items()
            if inspect.isclass(kind)
            and issubclass(kind, torch.optim.Optimizer)
            and kind is not torch.optim.Optimizer
        }
        known["adamw-compensated"] = CompensatedAdamW
        if given.lower() not in known:
            raise UnknownNameError("optimizer", given, sorted(known), where="optimizer")
        return known[given.lower()]
    if given is None or isinstance(given, torch.optim.Optimizer) or callable(given):
        return given
    raise InputError(
        f"optimizer is {a_type(given)}",
        hints=['give "adamw", a factory `lambda params: torch.optim.AdamW(params)`, or one built'],
    )


def cluster_of(given: object) -> ClusterProfile | None:
    """A profile, or the one of that name or file; None of "auto": this machine, or its job.

    Raises:
        UnknownNameError, FileError: neither a known name nor a file.
        InputError: it is something else.
    """
    if given is None or given == "auto" or isinstance(given, ClusterProfile):
        return given if isinstance(given, ClusterProfile) else None
    if isinstance(given, str):
        return resolve_cluster(given)
    count = f"{given}x" if type(given) is int else "8x"
    raise InputError(
        f"cluster is {a_type(given)}: a number of devices does not say which",
        where=f"cluster={given!r}",
        hints=[f'name them: cluster="{count}H100-SXM-80GB", or give a cluster.toml, or "auto"'],
    )
