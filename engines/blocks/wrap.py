"""Wrapped forwards, which stay with a module when it is copied."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


def wrap_forward(module: nn.Module, around: Callable[..., object]) -> None:
    """Replace calls of `module` by `around(forward, module, *args, **kwargs)`, in place.

    `forward` is what it was before. Names of parameters, hooks, the module's class and the names of
    its arguments stay as they are. A copy of the module computes with the copy's parameters, and
    `around` gets the copy.
    """
    own = module.forward
    # A method of the module is bound to the called object, a copy say; other functions are not.
    method = own.__func__ if isinstance(own, MethodType) and own.__self__ is module else None

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> object:
        bound = own if method is None else MethodType(method, self)
        return around(bound, self, *args, **kwargs)

    if method is not None:  # trainers ask a model for the names of its arguments
        functools.update_wrapper(forward, method)
    vars(module)["forward"] = MethodType(forward, module)
