"""Blocks that hold or call their parts as an engine may not expect; one each, (rows, tokens, width)
to the same."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fuzz_modules.common import (
    VOCABULARY,
    Build,
    Mlp,
    MultiheadAttention,
    activation,
    block,
    head_count,
    hidden_size,
)

UNUSUAL: dict[str, Build] = {}
register = block(UNUSUAL)


# Parameters outside of their module's call


class Table(nn.Module):
    """A parameter that its call returns."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(*shape) * 0.3)

    def forward(self) -> Tensor:
        return self.table


@register
class LatentQueries(nn.Module):
    """Latents, returned by a module or read from it, ask the tokens, and tokens ask them."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.is_called, heads = draw.random() < 0.5, head_count(draw, width)
        self.latents = Table(draw.choice((1, 3, 4)), width)
        self.ask = nn.MultiheadAttention(width, heads, batch_first=True)
        self.answer = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        table = self.latents() if self.is_called else self.latents.table
        q = table.expand(len(x), -1, -1)
        q = q + self.ask(q, x, x, need_weights=False)[0]
        return x + self.answer(x, q, q, need_weights=False)[0]


@register
class WeightOfAnother(nn.Module):
    """Reads the weight of a layer that it also calls, or that it never calls."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.is_called = draw.random() < 0.5
        self.up = nn.Linear(width, hidden_size(draw, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x) if self.is_called else F.linear(x, self.up.weight)
        return x + F.linear(F.gelu(y), self.up.weight.T)


@register
class Scales(nn.Module):
    """Parameters without a dimension and with one."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.one = nn.Parameter(torch.full((1,), 0.9))
        self.shift = nn.Parameter(torch.randn(width) * 0.1)
        self.inner = Mlp(draw, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale) * self.one + self.shift


@register
class Tied(nn.Module):
    """Two layers with one weight; or one that is the other's transposed."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(x)))


@register
class Unused(nn.Module):
    """Holds a layer and a parameter that nobody uses."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.spare, self.inner = nn.Linear(width, width), Mlp(draw, width)
        self.also = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


# Tables


@register
class BagPair(nn.Module):
    """An `nn.EmbeddingBag` whose output feeds a pair of layers."""

    takes = ("ids",)

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        mode, size = draw.choice(("sum", "mean", "max")), hidden_size(draw, width)
        self.bag = nn.EmbeddingBag(VOCABULARY, width, mode=mode)
        self.up, self.down = nn.Linear(width, size), nn.Linear(size, width)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.bag(ids))))[:, None]


@register
class TablePair(nn.Module):
    """An embedding that feeds a pair of layers in its own block; perhaps its gradient is sparse."""

    takes = ("ids",)

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        size, sparse = hidden_size(draw, width), draw.random() < 0.4
        self.table = nn.Embedding(VOCABULARY, width, sparse=sparse)
        self.up, self.down = nn.Linear(width, size), nn.Linear(size, width)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.table(ids))))


@register
class SparseTable(nn.Module):
    takes = ("ids",)

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, width, sparse=True)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.table(ids)


# Rows that are not the batch's


@register
class Folded(nn.Module):
    """MobileViT: convolutions, then layers over patches that are folded into the rows."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.enter = nn.Conv1d(width, width, 3, padding=1)
        count = draw.choice((1, 2))
        self.layers = nn.ModuleList(MultiheadAttention(draw, width) for _ in range(count))
        self.leave = nn.Conv1d(2 * width, width, 1)
        self.tokens_first = draw.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x.transpose(1, 2)).transpose(1, 2)
        rows, tokens, width = y.shape
        part = 2 if tokens % 2 == 0 else 1
        if self.tokens_first:
            y = (
                y.reshape(rows, part, tokens // part, width)
                .transpose(1, 2)
                .reshape(-1, part, width)
            )
        else:
            y = y.reshape(rows * part, tokens // part, width)
        for layer in self.layers:
            y = layer(y)
        if self.tokens_first:
            y = y.reshape(rows, tokens // part, part, width).transpose(1, 2)
        y = y.reshape(rows, tokens, width)
        return self.leave(torch.cat([x, y], -1).transpose(1, 2)).transpose(1, 2)


@register
class FoldedMlp(nn.Module):
    """All tokens of all rows as one long batch."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.inner = Mlp(draw, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.flatten(0, 1)).view_as(x)


# Calls


@register
class CalledTwice(nn.Module):
    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.times, self.inner = draw.choice((2, 3)), Mlp(draw, width)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.inner(x)
        return x


@register
class ReturnsStructure(nn.Module):
    """Modules hand on a dict, a tuple with None, and a list."""

    class _Dict(nn.Module):
        def __init__(self, draw: Random, width: int) -> None:
            super().__init__()
            self.inner = Mlp(draw, width)

        def forward(self, *, given: dict[str, Tensor]) -> tuple[dict[str, Any], None]:
            y = self.inner(given["x"])
            return {"x": y, "more": [y.mean(-1, keepdim=True), 2]}, None

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.first, self.second = self._Dict(draw, width), self._Dict(draw, width)

    def forward(self, x: Tensor) -> Tensor:
        made, _ = self.first(given={"x": x})
        made, _ = self.second(given=made)
        return made["x"] + made["more"][0] * made["more"][1]


@register
class Dense(nn.Module):
    """Every layer takes all before it."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        count = draw.choice((2, 3))
        self.layers = nn.ModuleList(nn.Linear(n * width, width) for n in range(1, count + 1))
        self.act = activation(draw)

    def forward(self, x: Tensor) -> Tensor:
        every = [x]
        for layer in self.layers:
            every.append(self.act(layer(torch.cat(every, -1))))
        return torch.stack(every).sum(0)


@register
class Nested(nn.Module):
    """Containers in containers, with names that are numbers and words."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.paths = nn.ModuleDict(
            {
                "left": nn.ModuleList([nn.Sequential(Mlp(draw, width), nn.Identity())]),
                "right": nn.Sequential(nn.Sequential(nn.Linear(width, width), nn.Tanh())),
            }
        )
        self.mix = nn.ParameterDict({"a": torch.tensor(0.3), "b": torch.randn(width)})
        self.each = nn.ParameterList([torch.randn(width) * 0.1 for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        left = x
        for module in self.paths["left"]:
            left = module(left)
        return left * self.mix["a"] + self.paths["right"](x) * self.mix["b"] + sum(self.each)


@register
class Checkpointed(nn.Module):
    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.inner, self.reentrant = Mlp(draw, width), draw.random() < 0.3

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return out


# Frozen parts, adapters, dtypes


@register
class Frozen(nn.Module):
    """A trunk that is not trained, inside of `no_grad` or not."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.trunk, self.inner = Mlp(draw, width).requires_grad_(False), Mlp(draw, width)
        self.no_grad = draw.random() < 0.4

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.no_grad):
            y = self.trunk(x)
        return x + self.inner(y)


@register
class HalfFrozen(nn.Module):
    """Weights that are not trained beside biases that are."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.inner = Mlp(draw, width)
        for name, parameter in self.inner.named_parameters():
            parameter.requires_grad_(name.endswith("bias") or "norm" in name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class LowRank(nn.Module):
    """A frozen layer, perhaps in bf16, and a trained product of two small ones (LoRA)."""

    def __init__(self, inputs: int, outputs: int, *, half: bool) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        if half:
            self.base.bfloat16()
        self.a, self.b = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x.to(self.base.weight.dtype)).to(x.dtype) + self.b(self.a(x))


@register
class Adapted(nn.Module):
    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        half, size = draw.random() < 0.5, 2 * width
        self.up = LowRank(width, size, half=half)
        self.down = LowRank(size, width, half=half)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


@register
class SeveralDtypes(nn.Module):
    """Parameters of float32 and of float64 (or a frozen one of float16) in one unit."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(width, width), nn.Linear(width, width).double()
        self.fixed = nn.Parameter(torch.randn(width).half(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.high(torch.tanh(self.low(x)).double()).to(x.dtype) + self.fixed.to(x.dtype)


@register
class ComplexFilter(nn.Module):
    """A filter of frequencies."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, dtype=torch.cfloat) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x, dim=1) * self.weight
        return x + torch.fft.irfft(spectrum, n=x.shape[1], dim=1)
