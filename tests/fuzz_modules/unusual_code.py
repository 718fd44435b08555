"""Blocks whose code does what an engine may not expect; one each, (rows, tokens, width) to the
same."""

from __future__ import annotations

import functools
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations, parametrize

from tests.fuzz_modules.common import (
    Mlp,
    activation,
)
from tests.fuzz_modules.unusual import register

# State that the forward changes


@register
class LearningBuffer(nn.Module):
    """A running mean that the forward uses and changes: in place, or by assignment."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.in_place, self.inner = draw.random() < 0.5, Mlp(draw, width)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x - self.mean)
        with torch.no_grad():
            now = x.mean((0, 1))
            if self.in_place:
                self.mean.mul_(0.9).add_(now, alpha=0.1)
                self.calls += 1
            else:
                self.mean = 0.9 * self.mean + 0.1 * now
                self.calls = self.calls + 1
        return y


@register
class ChangedParameter(nn.Module):
    """The forward shrinks its own weight; or a copy of it follows by averaging."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.by_data = draw.random() < 0.3
        self.target = nn.Linear(width, width).requires_grad_(False)
        self.is_target = draw.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.is_target:
                self.target.weight.lerp_(self.layer.weight, 0.1)
            else:
                self.layer.weight.mul_(0.99)
        return x + self.layer(x) + self.target(x)


@register
class SpectralNorm(nn.Module):
    """Its power iteration changes buffers in every forward."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.layer = parametrizations.spectral_norm(nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


# Hooks, parametrizations, functions


@register
class Hooked(nn.Module):
    """Hooks before and after forwards and backwards, on modules and on a parameter."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.inner = Mlp(draw, width)
        kind = draw.choice(("forward", "before", "backward", "parameter", "tensor"))
        self.kind = kind
        if kind == "forward":
            self.inner.up.register_forward_hook(lambda module, args, output: output * 1.5)
        elif kind == "before":
            self.inner.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        elif kind == "backward":
            self.inner.down.register_full_backward_hook(
                lambda module, gradients, outputs: tuple(
                    g * 0.5 if g is not None else g for g in gradients
                )
            )
        elif kind == "parameter":
            self.inner.up.weight.register_hook(lambda gradient: gradient * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.kind == "tensor" and y.requires_grad:
            y.register_hook(lambda gradient: gradient * 0.5)
        return y


@register
class SavedByHook(nn.Module):
    """A hook keeps what a layer returns, and the block uses it."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.inner = Mlp(draw, width)
        self.saved: list[Tensor] = []
        self.inner.up.register_forward_hook(self._save)

    def _save(self, module: nn.Module, args: object, output: Tensor) -> None:
        self.saved.append(output)

    def forward(self, x: Tensor) -> Tensor:
        self.saved.clear()
        y = self.inner(x)
        out = y + self.saved[0].mean(-1, keepdim=True)
        self.saved.clear()
        return out


class _Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


@register
class Parametrized(nn.Module):
    """Weight norm, orthogonal weights, a symmetric one, and weight norm as it was before them."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        kind = draw.choice(("weight", "orthogonal", "symmetric", "old"))
        first, second = nn.Linear(width, width), nn.Linear(width, width)
        if kind == "weight":
            first, second = map(parametrizations.weight_norm, (first, second))
        elif kind == "orthogonal":
            parametrizations.orthogonal(first)
        elif kind == "symmetric":
            parametrize.register_parametrization(first, "weight", _Symmetric())
        else:
            torch.nn.utils.weight_norm(first)
        self.first, self.second, self.act = first, second, activation(draw)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.act(self.first(x)))


@register
class Functional(nn.Module):
    """torch.func within the forward: vmap, a call with other weights, an inner gradient."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.kind = draw.choice(("vmap", "call", "ensemble", "grad"))
        self.layer = nn.Linear(width, width)
        if self.kind == "ensemble":
            self.weights = nn.Parameter(torch.randn(3, width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "vmap":
            return x + vmap(lambda row: torch.tanh(F.linear(row, self.layer.weight)))(x)
        if self.kind == "call":
            scaled = {name: p * 0.5 for name, p in self.layer.named_parameters()}
            return x + functional_call(self.layer, scaled, (x,))
        if self.kind == "ensemble":
            each = vmap(lambda w: torch.tanh(F.linear(x, w)))(self.weights)
            return self.layer(x + each.mean(0))
        inner = grad(lambda v: (torch.tanh(F.linear(v, self.layer.weight)) ** 2).sum())
        return x + inner(x)


class _Straight(torch.autograd.Function):
    """A function with the gradient of another one. (One that rounds would jump with rounding.)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return torch.sin(x) * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (scale,) = ctx.saved_tensors
        return gradients[0] * scale, gradients[0].sum(tuple(range(gradients[0].dim() - 1)))


@register
class OwnFunction(nn.Module):
    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(width)), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Straight.apply(self.inner(x), self.scale)
        return x + torch.tanh(x) * out.detach() + 0.1 * _Straight.apply(x, self.scale)


@register
class InPlace(nn.Module):
    """Writes to views of what a layer returned, and to its input."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.writes_input = draw.random() < 0.4

    def forward(self, x: Tensor) -> Tensor:
        if self.writes_input:
            x = x.clone() if x.is_leaf else x
            x[:, :1].mul_(0.5)
        left, right = self.first(x).split(x.shape[-1], -1)
        left = left.clone().add_(right)
        left[:, 1:] += 0.5 * left[:, :1].clone()
        y = self.second(left)
        y[..., :2] *= 2.0
        return y.add_(x)


# Values


@register
class ValueBranch(nn.Module):
    """A branch on the mask, a loop over a count, a selection of tokens, or a branch on a result."""

    takes = ("ids", "mask")

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.kind = draw.choice(("any", "count", "select", "mean", "nonzero"))
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        if self.kind == "any" and mask.any():
            y = y + self.second(y) * mask[..., None]
        elif self.kind == "count":
            for _ in range(int(ids.max()) % 3):
                y = y + 0.5 * self.second(y)
        elif self.kind == "select":
            y = y.masked_scatter(mask[..., None], self.second(y[mask]))
        elif self.kind == "mean":
            y = self.second(y) if y.mean() > -9 else self.first(y)
        elif self.kind == "nonzero":
            rows, tokens = mask.nonzero(as_tuple=True)
            y = y.index_put((rows, tokens), self.second(y[rows, tokens]))
        return x + y


@register
class ByTurns(nn.Module):
    """A list of heads of which each forward takes the next."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.turn = 0

    def forward(self, x: Tensor) -> Tensor:
        head = self.heads[self.turn % 2]
        self.turn += 1
        return x + head(x)


@register
class Partial(nn.Module):
    """A `functools.partial` and a plain function hold modules; an attribute is a lambda."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.act = functools.partial(F.leaky_relu, negative_slope=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.inner(x))


@register
class NoGradientPath(nn.Module):
    """Part of what it makes is detached: a stop of gradients between two layers."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return x + self.second(y.detach()) + 0.1 * y
