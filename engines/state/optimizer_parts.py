"""Trials of an optimizer on parts: what it cannot step without the rest.

Ranks may have some rows of a matrix, some of its columns, or some parameters of a model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engines.state.chunked_step import step_in_chunks
from engines.state.optimizer import OptimizerFactory
from engines.state.sharded_step import trial_of
from profiles.units import format_percent
from profiles.workload.optimizers import DIVISIBLE, Indivisible

Given = torch.optim.Optimizer | OptimizerFactory

# Two-dimensional, as most weights are, and large enough that half of it is treated like them: 8-bit
# optimizers treat tensors under 4,096 elements differently.
_SHAPE = (128, 64)
# Largest difference between a step on a matrix and on its parts that is rounding.
_ROUNDING = 1e-5


def sparse_alone(given: Given | None) -> str:
    """The reason why dense gradients cannot be stepped; empty where they can, or where the
    optimizer cannot be made for a trial."""
    if given is None:
        return ""
    try:
        optimizer = tiny(given)[0]
    except Exception:  # whatever a user's class raises: it is not refused for that
        return ""
    if not isinstance(optimizer, torch.optim.SparseAdam):
        return ""
    return f"{type(optimizer).__name__} steps sparse gradients alone, this plan sends dense ones"


def indivisible(given: Given | None, model: nn.Module | None = None) -> Indivisible:
    """The reasons why parts cannot be stepped alone: they get another update, or none.

    Empty where it is the same, or where the optimizer cannot be tried.

    Args:
        model: its parameters show the groups that a factory makes; each is tried.
    """
    if given is None:
        return DIVISIBLE
    groups = _kinds_of_groups(given, model)
    return Indivisible(
        rows=sparse_alone(given)
        or _why_apart(
            lambda settings: _by_halves(given, settings, dim=0, steps=2),
            groups,
            "a whole matrix at a time: stepped in two halves, its update differs",
        ),
        # One step of values that are not zero: those that keep states in 8 bits round from the
        # second on, which is no look at a row.
        columns=_why_apart(
            lambda settings: _by_halves(given, settings, dim=1, steps=1),
            groups,
            "whole rows of a matrix: stepped with half of its columns, its update differs",
        ),
        parameters=_why_apart(
            lambda settings: _one_by_one(given, settings),
            groups,
            "all parameters at a time: stepped without the others, their updates differ",
        ),
    )


def _kinds_of_groups(given: Given, model: nn.Module | None) -> list[dict[str, Any]]:
    """Settings of groups that differ by more than numbers, as of those that Muon steps and the
    rest; one without settings where groups are not known."""
    optimizer: torch.optim.Optimizer | None = None
    if isinstance(given, torch.optim.Optimizer):
        optimizer = given
    elif model is not None:
        shapes = [
            nn.Parameter(torch.empty_like(parameter, device="meta"))
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        with contextlib.suppress(Exception):  # of the user's code, which may want values
            optimizer = given(shapes)
    kinds: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups if optimizer is not None else ():
        settings = {name: value for name, value in group.items() if name != "params"}
        kind = {n: type(v) if type(v) in (int, float) else v for n, v in settings.items()}
        kinds.setdefault(repr(kind), settings)
    return list(kinds.values()) or [{}]


def _why_apart(
    run: Callable[[dict[str, Any]], tuple[str, Tensor, Tensor]],
    groups: Sequence[dict[str, Any]],
    looks_at: str,
) -> str:
    """The reason, where the update of a whole is not that of its parts in one of the groups."""
    for settings in groups:
        try:
            name, whole, parts = run(settings)
        except Exception:  # whatever a user's class raises: it is not refused for that
            continue
        if (difference := _difference(whole, parts)) > _ROUNDING:
            return f"{name} looks at {looks_at} by {_percent(difference)}"
    return ""


def why_not_chunked(given: Given | None) -> str:
    """The reason why parameters cannot be stepped one by one: their updates would differ, or the
    optimizer's states of all of them.

    Empty where it is the same, or where the optimizer cannot be tried.
    """
    if given is None:
        return ""
    try:
        name, joint = _stepped(given, chunked=False)
        _, chunked = _stepped(given, chunked=True)
    except Exception:  # whatever a user's class raises: it is not refused for that
        return ""
    if (difference := _difference(joint, chunked)) <= _ROUNDING:
        return ""
    return (
        f"{name} looks at all parameters at a time: stepped one after the other, they differ by"
        f" {_percent(difference)}"
    )


def _difference(whole: Tensor, parts: Tensor) -> float:
    """The largest one, as a fraction of the largest number of the whole."""
    scale = whole.abs().max().item()
    return (whole - parts).abs().max().item() / scale if scale else 0.0


def _percent(difference: float) -> str:
    return format_percent(difference) if difference >= 0.0005 else "less than 0.1%"


def _stepped(given: Given, *, chunked: bool) -> tuple[str, Tensor]:
    """Two matrices after three steps, the second one with gradients ten times as large."""
    generator = torch.Generator().manual_seed(0)
    matrices = [nn.Parameter(torch.zeros(_SHAPE)) for _ in range(2)]
    optimizer = trial_with(given, matrices)
    for _ in range(3):
        for scale, matrix in zip((1.0, 10.0), matrices, strict=True):
            matrix.grad = scale * torch.randn(_SHAPE, generator=generator)
        if chunked:
            step_in_chunks(optimizer, optimizer.step, chunk_bytes=0)
        else:
            optimizer.step()
    return type(optimizer).__name__, torch.cat([matrix.detach() for matrix in matrices])


def _by_halves(
    given: Given, settings: dict[str, Any], *, dim: int, steps: int
) -> tuple[str, Tensor, Tensor]:
    """Updates of a matrix, and of its halves along a dimension: from zeros, where optimizers look
    at the size of a matrix, in the second of two steps; from random values in one."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(_SHAPE, generator=generator) for _ in range(steps)]
    values = torch.zeros(_SHAPE) if steps > 1 else torch.randn(_SHAPE, generator=generator)
    settings = dict(settings)
    updates: list[Tensor] = []
    halves_of_all = zip(*(tensor.chunk(2, dim) for tensor in (values, *gradients)), strict=True)
    for parts in ((values, *gradients), *halves_of_all):
        before, *own = parts
        optimizer, matrix = tiny(given, before)
        _set_group(optimizer, matrix, settings)
        for gradient in own:
            matrix.grad = gradient.clone()
            optimizer.step()
        updates.append(matrix.detach() - before)
    whole, *halves = updates
    return type(optimizer).__name__, whole, torch.cat(halves, dim)


def _one_by_one(given: Given, of_group: dict[str, Any]) -> tuple[str, Tensor, Tensor]:
    """Updates of two matrices in one optimizer, and in two. It takes three steps; the second matrix
    has gradients ten times as large."""
    settings = [dict(of_group), dict(of_group)]

    def stepped(*numbers: int) -> tuple[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        gradients = torch.randn(3, 2, *_SHAPE, generator=generator)
        matrices = [nn.Parameter(torch.zeros(_SHAPE)) for _ in numbers]
        optimizer = trial_with(given, matrices)
        for number, matrix in zip(numbers, matrices, strict=True):
            _set_group(optimizer, matrix, settings[number])
        for gradient in gradients:
            for number, matrix in zip(numbers, matrices, strict=True):
                matrix.grad = 10.0**number * gradient[number]
            optimizer.step()
        return type(optimizer).__name__, torch.cat([matrix.detach() for matrix in matrices])

    (name, joint), (_, first), (_, second) = stepped(0, 1), stepped(0), stepped(1)
    return name, joint, torch.cat([first, second])


def _set_group(
    optimizer: torch.optim.Optimizer, matrix: nn.Parameter, settings: dict[str, Any]
) -> None:
    """Give the group of a part these settings, or those of the whole's, which are noted first: a
    factory may sort by sizes or places, which parts have not (`parameter_groups`)."""
    for group in optimizer.param_groups:
        if any(p is matrix for p in group["params"]):
            if not settings:
                settings.update((k, v) for k, v in group.items() if k != "params")
            group.update(settings)


def tiny(given: Given, values: Tensor | None = None) -> tuple[torch.optim.Optimizer, nn.Parameter]:
    """An optimizer of tiny parameters, and the matrix among them, of these values or zeros.

    A factory may need parameters of all kinds, as matrices for Muon and the rest for AdamW, or
    matrices alone.
    """
    zeros = torch.zeros(_SHAPE)
    matrix, *others = (
        nn.Parameter(tensor.clone())
        for tensor in (zeros if values is None else values, zeros, zeros[0])
    )
    for parameter in (matrix, *others):
        parameter.grad = torch.ones_like(parameter)
    if isinstance(given, torch.optim.Optimizer):
        return trial_with(given, [matrix]), matrix
    try:
        return given([matrix, *others]), matrix
    except Exception:  # a factory is the user's code; what it raises for a matrix too is shown
        return given([matrix]), matrix


def trial_with(
    given: Given,
    parameters: list[nn.Parameter],
    fakes_of: Mapping[nn.Parameter, nn.Parameter] | None = None,
) -> torch.optim.Optimizer:
    """A second optimizer of the same settings with `parameters` only.

    With `fakes_of` every group gets those of its own parameters, else the first group gets all.
    """
    if not isinstance(given, torch.optim.Optimizer):
        return given(parameters)
    trial = trial_of(given, parameters)
    if fakes_of is not None:
        trial.param_groups = [
            {**group, "params": [fakes_of[p] for p in group["params"] if p in fakes_of]}
            for group in given.param_groups
        ]
    return trial
