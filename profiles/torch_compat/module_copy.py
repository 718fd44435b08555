"""Deep copies of modules that hold results of operations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Module = TypeVar("Module", bound=nn.Module)


def copy_module(module: Module, memo: dict[int, Any] | None = None) -> Module:
    """A deep copy, with results of operations detached.

    `copy.deepcopy` refuses what a forward left on its module, and the weights that hooks of
    `torch.nn.utils.weight_norm` and `spectral_norm` compute anew before each call.

    Args:
        memo: copies by the `id` of what they are of, as for `copy.deepcopy`.
    """
    with _Detaching():
        return copy.deepcopy(module, {} if memo is None else memo)


class _Detaching(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, copies = args
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.detach().clone()
            return copies[id(tensor)]
        return func(*args, **(kwargs or {}))
