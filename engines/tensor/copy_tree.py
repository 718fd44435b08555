"""Copies of a call's arguments, down to the tensors inside of objects."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from profiles.errors import ModelError, a_type
from profiles.torch_compat import Tree, map_leaves
from profiles.torch_compat.module_copy import TensorCopies


def copy_tree(tree: Tree, of: Callable[[Tensor], Tensor]) -> Tree:
    """`tree` with `of(tensor)` for every tensor, also inside of its objects.

    Objects, a cache of keys and values say, are copied: a call writes to the copy alone.
    An object that occurs twice is one object in the copy too.

    Raises:
        ModelError: an object that cannot be copied.
    """
    copies: dict[int, Any] = {}

    def leaf(value: object) -> object:
        if isinstance(value, Tensor):
            return of(value)
        try:
            with _Replacing(of):
                return copy.deepcopy(value, copies)
        except Exception as error:  # an object may fail to be copied in a way of its own
            raise ModelError(f"{a_type(value)} cannot be copied: {error}") from error

    return map_leaves(leaf, tree)


class _Replacing(TensorCopies):
    """A deep copy has `of(tensor)` in place of every tensor.

    Without it results of operations, which a cache holds, are refused, and copies of fake tensors
    outside of their mode crash the process.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        is_own_way = func is not Tensor.__deepcopy__  # a parameter copies itself so
        if is_own_way and any(isinstance(value, Tensor) for value in args):
            raise TypeError("it holds tensors that are copied in a way of their own")
        return super().__torch_function__(func, types, args, kwargs)
