"""Modules whose parts are on devices that this machine may not have: parameters that are fake."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses import FakeTensorMode


def put(module: nn.Module, device: str) -> nn.Module:
    """`module` with its parameters on `device`, which need not be there; nothing computes on it."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        for part in module.modules():
            for name, parameter in list(part.named_parameters(recurse=False)):
                there = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                setattr(part, name, nn.Parameter(there))
    return module
