"""Selective recompute: the outputs of a block's products are kept, all else is computed again.

torch's own contexts (`create_selective_checkpoint_contexts`) refuse a product whose output is
written into later, as `nn.ReLU(inplace=True)` behind a convolution does. Here the output is copied
before that, so that the second run goes on from what the product made.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from profiles.capture.operators.table import kept_operators
from profiles.torch_compat import (
    Operator,
    TorchDispatchMode,
    alias_of,
    is_mutable,
    map_leaves,
    storage_of,
    tensors_written,
    version_of,
)

OTHER_PRODUCT = "a product in the second run of a block was not in the first"


def selective_contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts of the first and of the second run of a block."""
    products = _Products()
    return _FirstRun(products), _SecondRun(products)


_Shapes = tuple[torch.Size, ...]


class _Kept:
    """A tensor as a product made it."""

    def __init__(self, made: Tensor) -> None:
        self.tensor = alias_of(made)
        self.version = version_of(made)

    def copy(self) -> None:
        self.tensor = self.tensor.clone()
        self.version = version_of(self.tensor)


class _Products:
    """Outputs of a block's products, by operator in the order of calls."""

    def __init__(self) -> None:
        self._outputs: dict[Operator, deque[tuple[_Shapes, object]]] = {
            operator: deque() for operator in kept_operators()
        }
        self._by_memory: dict[int, list[_Kept]] = defaultdict(list)

    def has(self, operator: Operator) -> bool:
        return operator in self._outputs

    def keep(self, operator: Operator, args: Sequence[object], output: object) -> None:
        def saved(leaf: object) -> object:
            if not isinstance(leaf, Tensor):
                return leaf
            entry = _Kept(leaf)
            self._by_memory[id(storage_of(leaf))].append(entry)
            return entry

        self._outputs[operator].append((_shapes(args), map_leaves(saved, output)))

    def copy(self, tensors: Iterable[Tensor]) -> None:
        """Copy what is kept in the memory of these tensors, which is about to change."""
        for tensor in tensors:
            for entry in self._by_memory.pop(id(storage_of(tensor)), ()):
                entry.copy()

    def end(self) -> None:
        """The first run is over: later writes are not seen here."""
        self._by_memory.clear()

    def take(self, operator: Operator, args: Sequence[object]) -> tuple[object, bool]:
        """The output of the next call, and whether it is as it was made: code between blocks may
        have written into it."""
        if not self._outputs[operator]:
            raise RuntimeError(OTHER_PRODUCT)
        shapes, output = self._outputs[operator].popleft()
        if shapes != _shapes(args):
            raise RuntimeError(OTHER_PRODUCT)
        is_as_made = True

        def taken(leaf: object) -> object:
            nonlocal is_as_made
            if not isinstance(leaf, _Kept):
                return leaf
            is_as_made &= version_of(leaf.tensor) == leaf.version
            return leaf.tensor

        return map_leaves(taken, output), is_as_made


def _shapes(args: Sequence[object]) -> _Shapes:
    return tuple(leaf.shape for leaf in args if isinstance(leaf, Tensor))


class _Run(TorchDispatchMode):
    """A forward of a block, whose products are looked at."""

    def __init__(self, products: _Products) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._products = products


class _FirstRun(_Run):
    """Keeps the outputs of products."""

    def __torch_dispatch__(
        self, func: Operator, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        if is_mutable(func):
            self._products.copy(tensors_written(func, args, kwargs))
        output = func(*args, **kwargs)
        if self._products.has(func):
            self._products.keep(func, args, output)
        return output

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._products.end()


class _SecondRun(_Run):
    """Gives products the outputs that were kept; each once."""

    def __torch_dispatch__(
        self, func: Operator, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        if self._products.has(func):
            output, is_as_made = self._products.take(func, args)
            if is_as_made:
                return output
        return func(*args, **(kwargs or {}))
