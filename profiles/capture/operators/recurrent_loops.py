"""Recurrent layers that torch takes through a sequence step by step, in C++.

A launch is timed from Python, and Python is most of it: operations that a loop in C++ launches, and
those of their backward, take the host less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from profiles.trace.scopes import Scope

_LOOPS = (torch.gru, torch.lstm, torch.rnn_relu, torch.rnn_tanh)


class RecurrentLoops(TorchFunctionMode):
    """Inside, operations of a forward that such a loop launches are noted in their scope.

    Args:
        scope: the one that runs now.
    """

    def __init__(self, scope: Callable[[], Scope]) -> None:
        super().__init__()
        self._scope = scope

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _LOOPS:
            return func(*args, **(kwargs or {}))
        scope = self._scope()
        before = scope.forward.kernels
        result = func(*args, **(kwargs or {}))
        scope.looped_kernels += scope.forward.kernels - before
        return result
