"""torch.compile, block by block: equal blocks are compiled once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Container

import torch
from torch import nn

from engines.blocks.recompute import holds_state
from engines.plan import Plan, Recompute
from profiles.errors import PlanError
from profiles.model.profile import ModelProfile


def require_compilable(
    model: nn.Module, plan: Plan, *, profile: ModelProfile, device: torch.device
) -> None:
    """Refuse what legality cannot see: missing compilers, and buffers that recompute would change.

    Raises:
        PlanError: on a CPU torch writes C++ and there is no compiler for it, or a block that is to
            run twice has statistics that must be counted once.
    """
    if not plan.compile:
        return
    compilers = (os.environ.get("CXX", ""), "g++", "clang++")  # those that torch's inductor tries
    if device.type == "cpu" and not any(map(shutil.which, compilers)):
        raise PlanError(
            "compile=true needs a C++ compiler on a CPU, none is on the PATH",
            where=f"looked for {', '.join(filter(None, compilers))}",
            hints=["install g++, name one in CXX, or set compile=false"],
        )
    if plan.recompute is Recompute.NONE:
        return
    for unit in profile.blocks():
        if holds_state(model.get_submodule(unit.name)):
            raise PlanError(
                f"`{unit.name}` has buffers that its forward might change: torch.compile cannot"
                " follow how recompute keeps them from changing twice",
                where=f"plan: {plan}",
                hints=["set recompute=none, or compile=false"],
            )


def compile_blocks(
    model: nn.Module, *, profile: ModelProfile, local: Container[str] | None = None
) -> None:
    """Let every block be compiled at its first call, in place; names and classes stay.

    `local`: first names of the parameters of this rank's stages, in a pipeline; blocks of other
    ranks are left alone.
    """
    from profiles.torch_compat.compiled_state import KEEPS_STATE  # inductor takes long to import

    names = {parameter: name for name, parameter in model.named_parameters()}
    for unit in profile.blocks():
        block = model.get_submodule(unit.name)
        if local is None or all(names[parameter] in local for parameter in block.parameters()):
            block.compile(options=KEEPS_STATE)
