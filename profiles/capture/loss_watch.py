"""The targets that reach the cross-entropy of a step, to weigh its mean by them.

Every integer tensor of the batch has a double whose elements are numbered. Operations that move
elements are done with the double too, so that the numbers which arrive at `cross_entropy` say which
elements those of the batch are compared with. An operation that computes ends the trail.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from profiles.capture.batch.call import Batch
from profiles.capture.batch.tree import batch_items
from profiles.model.loss_terms import LossTerms
from profiles.torch_compat import is_fake, map_leaves, tensors_in, without_modes
from profiles.torch_compat.logits import (
    ABOUT_GRADIENT,
    ABOUT_SHAPE,
    DETACHES,
    keeps_last,
    keeps_values,
    moves_last_to_second,
)

_SAME = frozenset({"clone", "contiguous", "detach", "long", "to"})
_MOVES = frozenset(
    {"__getitem__", "flatten", "narrow", "pad", "permute", "reshape", "squeeze", "t", "transpose"}
    | {"unsqueeze", "view", "view_as"}
)
_LOSSES = {function: inspect.signature(function) for function in (F.cross_entropy, F.nll_loss)}

_FIRST = 2**40
"""The number of the first element: no code writes such a value where it pads."""

_SILENT = ABOUT_SHAPE | ABOUT_GRADIENT | DETACHES


class LossWatch(TorchFunctionMode):
    """Around the forward and the loss of a step over `batch`."""

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self._numbers: dict[str, Tensor] = {}
        self._doubles: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        self._seen: list[LossTerms | None] = []
        # The number of each, and whether its classes were moved to the second dimension.
        self._products: dict[int, tuple[weakref.ref[Tensor], tuple[int, bool]]] = {}
        self._count = 0
        self._of_loss: int | None = None
        self._readers: dict[int, str] = {}
        first = _FIRST
        for name, value in batch_items(batch):
            if isinstance(value, Tensor) and value.ndim and _is_index(value):
                last = first + value.numel()
                with without_modes():
                    self._numbers[name] = torch.arange(first, last).view(tuple(value.shape))
                self._note(value, self._numbers[name])
                first = last

    @property
    def terms(self) -> LossTerms | None:
        """The targets of the loss; None where none or several were seen."""
        first = self._seen[0] if self._seen else None
        return first if all(terms == first for terms in self._seen) else None

    @property
    def logits_read_by(self) -> str:
        """See `ModelProfile`: the readers of the product that a cross-entropy takes, else those of
        the last one."""
        last = self._of_loss if self._of_loss is not None else self._count
        return self._readers.get(last, "")

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _LOSSES:
            self._seen.append(self._terms(_LOSSES[func].bind(*args, **kwargs)))
        result = func(*args, **kwargs)
        self._follow_product(func, args, kwargs, result)
        name = getattr(func, "__name__", "")
        if self._doubles and (name in _SAME or name in _MOVES):
            self._follow(func, args, kwargs, result)
        return result

    def _follow_product(
        self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: object
    ) -> None:
        """Follow products of linear layers through what leaves their last dimension alone, or moves
        it to the second."""
        if func in _SILENT:
            return  # sizes, strides and storages are asked for by the look itself
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        taken = [(tensor, n) for tensor in given if (n := self._product_of(tensor)) is not None]
        if func is F.linear and isinstance(result, Tensor):
            self._count += 1
            self._products[id(result)] = weakref.ref(result), (self._count, False)
        if not taken or not torch.is_grad_enabled() or not tensors_in(result):
            return
        (first, (number, is_moved)), *others = taken
        is_first = bool(args) and args[0] is first and not others
        rest = args[1:]
        moves = not is_moved and moves_last_to_second(func, first.dim(), rest, kwargs)
        keeps = keeps_values(func, rest, kwargs)
        keeps |= not is_moved and keeps_last(func, first.shape, rest, kwargs)
        if is_first and (moves or keeps):
            if isinstance(result, Tensor):
                self._products[id(result)] = weakref.ref(result), (number, moves or is_moved)
        elif is_first and func is F.cross_entropy and _is_by_rows(args, kwargs, is_moved):
            self._of_loss = number
        else:
            for _, (number, _) in taken:
                self._readers.setdefault(number, func.__name__)

    def _product_of(self, tensor: Tensor) -> tuple[int, bool] | None:
        alive, number = self._products.get(id(tensor), (None, None))
        return number if alive is not None and alive() is tensor else None

    def _follow(
        self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: object
    ) -> None:
        given = [self._double_of(tensor) for tensor in tensors_in((args, kwargs))]
        if not isinstance(result, Tensor) or not given or any(d is None for d in given):
            return
        with without_modes(), contextlib.suppress(Exception):  # then the trail ends here
            if func.__name__ in _SAME:
                self._note(result, given[0])
            else:
                own, named = map_leaves(self._own, (args, kwargs))
                self._note(result, func(*own, **named))

    def _note(self, tensor: Tensor, double: Tensor | None) -> None:
        assert double is not None
        self._doubles[id(tensor)] = weakref.ref(tensor), double.contiguous()

    def _double_of(self, tensor: Tensor) -> Tensor | None:
        alive, double = self._doubles.get(id(tensor), (None, None))
        return double if alive is not None and alive() is tensor else None

    def _own(self, leaf: object) -> object:
        return self._double_of(leaf) if isinstance(leaf, Tensor) else leaf

    def _terms(self, call: inspect.BoundArguments) -> LossTerms | None:
        call.apply_defaults()
        given = call.arguments
        double = self._double_of(given["target"])
        weights = _values(given["weight"])
        if given["reduction"] != "mean" or weights is None or double is None:
            return None
        with without_modes():
            ignored = int(given["ignore_index"])
            numbers = double[double != ignored].sort().values
            for name, own in self._numbers.items():
                for skipped in range(2 if own.ndim == 2 else 1):
                    compared = own[:, skipped:] if skipped else own
                    if torch.equal(compared.flatten(), numbers):
                        return LossTerms(
                            name=name, skipped=skipped, ignored=ignored, weights=weights
                        )
        return None


def _values(weight: Tensor | None) -> tuple[float, ...] | None:
    """The weights of classes; None where they have no values."""
    if weight is None:
        return ()
    return None if is_fake(weight) or weight.is_meta else tuple(weight.detach().tolist())


def _is_by_rows(args: Any, kwargs: Mapping[str, Any], is_moved: bool) -> bool:
    """True if a cross-entropy is a sum or a mean over rows (tokens, classes) of class numbers."""
    given = _LOSSES[F.cross_entropy].bind(*args, **kwargs)
    given.apply_defaults()
    asked = given.arguments
    is_old = asked["size_average"] is not None or asked["reduce"] is not None
    is_class = not asked["target"].is_floating_point()
    is_flat = is_moved or asked["input"].dim() == 2
    return is_class and not is_old and is_flat and asked["reduction"] != "none"


def _is_index(tensor: Tensor) -> bool:
    is_number = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool
    return not (is_number or tensor.is_nested)
