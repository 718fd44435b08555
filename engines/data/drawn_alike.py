"""Random numbers that are the same for every row.

Parts of a batch draw other numbers than the whole does: what their losses say of the rule for them
is then hidden, but not to a run in which all elements of a drawn tensor are one number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from profiles.torch_compat import Operator, TorchDispatchMode

_aten = torch.ops.aten
_NORMAL = 0.5
"""Standard deviations from the mean, where code that takes a sign would be at its edge."""


def _number(call: Callable[..., float]) -> Callable[..., object]:
    """Let `call` give the number of a tensor that the operator makes, or writes to."""

    def drawn(func: Operator, *args: Any, **kwargs: Any) -> object:
        if "generator" in kwargs:
            kwargs["generator"] = None
        with torch.random.fork_rng(devices=[]):
            result = func(*args, **kwargs)
        assert isinstance(result, Tensor)
        return result.fill_(call(*args))

    return drawn


def _middle(tensor: Tensor, low: float = 0.0, high: float = 1.0) -> float:
    return (low + high) / 2


def _below(high: int, *_: object) -> int:
    return high // 2


def _between(low: int, high: int, *_: object) -> int:
    return (low + high) // 2


_HALF = _number(lambda *_: 0.5)
_ONE = _number(lambda *_: 1)
_MADE: dict[object, Callable[..., object]] = {
    _aten.rand.default: _HALF,
    _aten.rand.generator: _HALF,
    _aten.rand_like.default: _HALF,
    _aten.uniform_.default: _number(_middle),
    _aten.randn.default: _number(lambda *_: _NORMAL),
    _aten.randn.generator: _number(lambda *_: _NORMAL),
    _aten.randn_like.default: _number(lambda *_: _NORMAL),
    _aten.normal_.default: _number(lambda _, mean=0.0, std=1.0: mean + _NORMAL * std),
    _aten.normal.float_float: _number(lambda mean, std, *_: mean + _NORMAL * std),
    _aten.normal.Tensor_Tensor: lambda _, mean, std, **__: mean + _NORMAL * std,
    _aten.normal.Tensor_float: lambda _, mean, std=1.0, **__: mean + _NORMAL * std,
    _aten.normal.float_Tensor: lambda _, mean, std, **__: mean + _NORMAL * std,
    _aten.exponential_.default: _ONE,
    _aten.bernoulli_.float: _ONE,  # of a dropout: it keeps all
    _aten.bernoulli.default: lambda _, p, **__: (p >= 0.5).to(p.dtype),
    _aten.randint.default: _number(_below),
    _aten.randint.generator: _number(_below),
    _aten.randint.low: _number(_between),
    _aten.randint.low_generator: _number(_between),
    _aten.randint_like.default: _number(lambda _, high: high // 2),
    _aten.randint_like.low_dtype: _number(lambda _, low, high: (low + high) // 2),
}


class DrawnAlike(TorchDispatchMode):
    """Give every element of what is drawn the same number, and let generators be.

    Operators that it does not know draw as they do.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Operator, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        made, kwargs = _MADE.get(func), kwargs or {}
        return func(*args, **kwargs) if made is None else made(func, *args, **kwargs)
