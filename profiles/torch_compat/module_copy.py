"""Deep copies of what holds tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Module = TypeVar("Module", bound=nn.Module)


class TensorCopies(TorchFunctionMode):
    """A deep copy has `of(tensor)` in place of a tensor; where that is None, torch's own copy."""

    def __init__(self, of: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self._of = of

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if func is Tensor.__deepcopy__:
            tensor, copies = args
            made = copies.get(id(tensor))
            made = self._of(tensor) if made is None else made
            if made is not None:
                copies[id(tensor)] = made
                return made
        return func(*args, **(kwargs or {}))


def copy_module(module: Module, memo: dict[int, Any] | None = None) -> Module:
    """A deep copy, with results of operations detached.

    `copy.deepcopy` refuses what a forward left on its module, and the weights that hooks of
    `torch.nn.utils.weight_norm` and `spectral_norm` compute anew before each call.

    Args:
        memo: copies by the `id` of what they are of, as for `copy.deepcopy`.
    """
    with TensorCopies(lambda tensor: None if tensor.is_leaf else tensor.detach().clone()):
        return copy.deepcopy(module, {} if memo is None else memo)
