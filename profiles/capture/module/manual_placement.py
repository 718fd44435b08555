"""Modules whose parts sit on several devices, as PyTorch's tutorial on model parallelism has them.

Such a module moves tensors itself, by `to(...)` in its forward; one process drives its devices.
"""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn


def devices_of(model: nn.Module) -> tuple[torch.device, ...]:
    """The devices that hold parameters and buffers, in the order of the modules.

    The meta device is none: what is there has no values yet, and nothing computes there.
    """
    tensors = chain(model.parameters(), model.buffers())
    return tuple(dict.fromkeys(tensor.device for tensor in tensors if not tensor.is_meta))


def is_manually_placed(model: nn.Module) -> bool:
    """True if parameters are on more than one device. (Buffers may be left behind by mistake.)"""
    return len({p.device for p in model.parameters() if not p.is_meta}) > 1


def accelerators_of(model: nn.Module) -> tuple[torch.device, ...]:
    """Of the devices of a module that was split by hand, those that are not the processor."""
    devices = devices_of(model) if is_manually_placed(model) else ()
    return tuple(device for device in devices if device.type != "cpu")
