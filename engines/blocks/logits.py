"""Logits that look whole and are not: what happens to all of them happens to what there is.

Between a head and its loss code casts logits, scales, shifts and flattens them. None of that needs
them in memory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from profiles.torch_compat import map_tensors, tensors_in, wrapper_tensor
from profiles.torch_compat.logits import (
    ABOUT_GRADIENT,
    ABOUT_SHAPE,
    DETACHES,
    keeps_last,
    keeps_values,
    moves_last_to_second,
)


class UnmadeLogits(Tensor):
    """Logits (..., vocabulary) of which this rank has something else.

    Casts, shapes that keep the last dimension, and scaling are `_applied` to it; `F.cross_entropy`
    over the last dimension is computed by `_loss`, and so is one of more places a row, whose
    classes are in the second (`ClassesSecond`). Everything else gets whole logits, made for it.
    """

    @abstractmethod
    def whole(self) -> Tensor:
        """The whole logits; all ranks that have a part call it."""

    @abstractmethod
    def _applied(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Self:
        """`func`, which keeps the last dimension."""

    @abstractmethod
    def _read(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """One of `ABOUT_GRADIENT`."""

    @abstractmethod
    def _loss(self, asked: AskedLoss) -> Tensor | None:
        """The loss of (tokens, vocabulary); None where it takes whole logits."""

    def _keeps(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        """True if `func` is `_applied`."""
        return keeps_last(func, self.shape, args, kwargs)

    def _turned(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> ClassesSecond | None:
        """The same logits with the vocabulary in the second dimension, if `func` puts it there."""
        is_turn = moves_last_to_second(func, self.dim(), args, kwargs)
        return ClassesSecond.of(self) if is_turn else None

    @property
    def _has_loss(self) -> bool:
        """True if its shape is one that `_loss` is for."""
        return self.dim() == 2

    def _made_for(self, func: Callable[..., Any]) -> Tensor:
        """The whole logits, which `func` reads."""
        return self.whole()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: object, args: object = (), kwargs: object = None
    ) -> Any:
        raise NotImplementedError(f"{func} on logits that are not made")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in ABOUT_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        own = args[0] if args else None
        if isinstance(own, UnmadeLogits):
            if func in ABOUT_GRADIENT:
                return own._read(func, args[1:], kwargs)
            if own._keeps(func, args[1:], kwargs):
                return own._applied(func, args[1:], kwargs)
            turned = own._turned(func, args[1:], kwargs)
            if turned is not None:
                return turned
            if func in DETACHES:
                with torch.no_grad():
                    return own.whole()
            if func is F.cross_entropy and own._has_loss:
                loss = own._loss(AskedLoss(*args[1:], **kwargs))
                if loss is not None:
                    return loss

        def made(tensor: Tensor) -> Tensor:
            return tensor._made_for(func) if isinstance(tensor, UnmadeLogits) else tensor

        return func(*map_tensors(made, tuple(args)), **map_tensors(made, kwargs))


class ClassesSecond(UnmadeLogits):
    """Logits (rows, vocabulary, ...) that are `last`, (rows, ..., vocabulary), turned around."""

    last: UnmadeLogits

    @classmethod
    def of(cls, last: UnmadeLogits) -> Self:
        rows, *places, vocabulary = last.shape
        logits = wrapper_tensor(cls, (rows, vocabulary, *places), last)
        logits.last = last
        return logits

    def whole(self) -> Tensor:
        return self.last.whole().movedim(-1, 1)

    def _made_for(self, func: Callable[..., Any]) -> Tensor:
        return self.last._made_for(func).movedim(-1, 1)

    def _keeps(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        return keeps_values(func, args, kwargs)

    def _turned(self, *_: object) -> None:
        return None

    @property
    def _has_loss(self) -> bool:
        return True

    def _applied(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Self:
        return self.of(self.last._applied(func, args, kwargs))

    def _read(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        return self.last._read(func, args, kwargs)

    def _loss(self, asked: AskedLoss) -> Tensor | None:
        if not asked.is_of_classes:
            return None
        flat = self.last._applied(Tensor.reshape, (-1, self.last.shape[-1]), {})
        target = asked.target.flatten()
        loss = flat._loss(replace(asked, target=target))
        is_each = loss is not None and asked.reduction == "none"
        return loss.view(asked.target.shape) if is_each else loss  # type: ignore[union-attr]


@dataclass(frozen=True)
class AskedLoss:
    """The arguments of `F.cross_entropy` beside its input (tokens, vocabulary)."""

    target: Tensor
    weight: Tensor | None = None
    size_average: bool | None = field(default=None, repr=False)
    ignore_index: int = -100
    reduce: bool | None = field(default=None, repr=False)
    reduction: str = "mean"
    label_smoothing: float = 0.0

    @property
    def is_of_classes(self) -> bool:
        """True if targets are class numbers, and the reduction is said in the one way."""
        is_old = self.size_average is not None or self.reduce is not None
        return not is_old and not self.target.is_floating_point()

    def terms(self) -> Tensor:
        """The number that a mean divides the sum by, 0-d: targets that count, or their weights."""
        is_counted = self.target != self.ignore_index
        if self.weight is None:
            return is_counted.sum()
        return self.weight[torch.where(is_counted, self.target, 0)].mul(is_counted).sum()


def whole_tensors(output: Any) -> Any:
    """`output` with whole logits; all ranks call it."""
    if not any(isinstance(tensor, UnmadeLogits) for tensor in tensors_in(output)):
        return output
    return map_tensors(lambda t: t.whole() if isinstance(t, UnmadeLogits) else t, output)
