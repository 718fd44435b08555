"""Arguments of a call that is made again in the backward.

Code around a block goes on with what it gave it: a list gets the block's output, a dict another
number for the next block. Tensors among them are saved by autograd, which says so where one was
written into; containers are made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from profiles.torch_compat import flatten, unflatten


class _Place(NamedTuple):
    """A tensor's place among the tensors."""

    number: int


class Arguments:
    """Of one call: its first run takes them as they are, each other one as they were.

    Attributes:
        tensors: those in tuples, lists and dicts, each once.
        others: what is no tensor there.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        leaves, self._structure = flatten((args, kwargs))
        of = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        places = {key: _Place(number) for number, key in enumerate(of)}
        self._leaves = [places.get(id(leaf), leaf) for leaf in leaves]
        self._first: tuple[Any, Any] | None = (args, kwargs)
        self.tensors = tuple(of.values())
        self.others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]

    def call(self, function: Callable[..., object], *tensors: Tensor) -> object:
        """Call `function` with them; `tensors` are `self.tensors` as autograd gives them."""
        args, kwargs = self._first or self._anew(tensors)
        self._first, self.tensors = None, ()
        return function(*args, **kwargs)

    def _anew(self, tensors: Sequence[Tensor]) -> Any:
        leaves = (tensors[n.number] if isinstance(n, _Place) else n for n in self._leaves)
        return unflatten(leaves, self._structure)
