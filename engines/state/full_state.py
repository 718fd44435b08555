"""Whole states under original names: gathered from all ranks, and loaded again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engines.state.layout import Layout
from profiles.errors import ModelError


class IncompatibleKeys(NamedTuple):
    """As `nn.Module.load_state_dict` returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@torch.no_grad()
def whole_state(model: nn.Module, layout: Layout) -> dict[str, Any]:
    """Every parameter and buffer whole, under its original name, on every rank."""
    state = dict(model.state_dict())
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return {**state, **dict(layout.wholes(tensors, tensors))}


@torch.no_grad()
def set_whole_state(
    model: nn.Module, state: dict[str, Any], layout: Layout, *, strict: bool
) -> IncompatibleKeys:
    """Load whole tensors, the same on every rank, into whatever the model holds now.

    Raises:
        ModelError: keys are missing or unexpected and `strict` is set, or a shape differs; nothing
            is changed.
    """
    wanted = model.state_dict()
    missing = [name for name in wanted if name not in state]
    unexpected = [name for name in state if name not in wanted]
    if strict and (missing or unexpected):
        raise ModelError(
            f"the state does not fit the model: {len(missing)} tensors missing,"
            f" {len(unexpected)} unexpected",
            where="\n".join(
                [f"missing: {name}" for name in missing[:1]]
                + [f"unexpected: {name}" for name in unexpected[:1]]
            ),
            hints=["load it with strict=False if that is meant"],
        )
    known = {name: value for name, value in state.items() if name in wanted}
    for name, value in known.items():
        if isinstance(value, Tensor):
            whole = layout.shape(name)
            shape = wanted[name].shape if whole is None else whole
            if value.shape != shape:
                raise ModelError(
                    f"`{name}` is {tuple(shape)} in the model, {tuple(value.shape)} in the state"
                )
    parts = {
        name: layout.part(name, value, like=wanted[name]) if isinstance(value, Tensor) else value
        for name, value in known.items()
        if layout.holds(name)
    }
    model.load_state_dict(parts, strict=False)
    return IncompatibleKeys(missing, unexpected)
