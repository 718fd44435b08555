"""torch.compile, block by block: equal blocks are compiled once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Container

import torch
from torch import nn

from profiles.errors import PlanError
from profiles.model import ModelProfile


def compile_blocks(
    model: nn.Module,
    *,
    profile: ModelProfile,
    device: torch.device,
    kept: Container[str] | None = None,
) -> None:
    """Let every block be compiled at its first call, in place; names and classes stay.

    `kept`: first names of the parameters of this rank's stages, in a pipeline; blocks of other
    ranks are left alone.

    Raises:
        PlanError: on a CPU torch writes C++, and there is no compiler for it.
    """
    compilers = (os.environ.get("CXX", ""), "g++", "clang++")  # those that torch's inductor tries
    if device.type == "cpu" and not any(map(shutil.which, compilers)):
        raise PlanError(
            "compile=true needs a C++ compiler on a CPU, none is on the PATH",
            where=f"looked for {', '.join(filter(None, compilers))}",
            hints=["install g++, name one in CXX, or set compile=false"],
        )
    names = {parameter: name for name, parameter in model.named_parameters()}
    for unit in profile.blocks():
        block = model.get_submodule(unit.name)
        if kept is None or all(names[parameter] in kept for parameter in block.parameters()):
            block.compile()
