"""Lists and dicts that blocks are given are for their second run what they were for the first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from profiles.errors import PlanError
from tests.engines.cases import Case
from tests.engines.parity import gradient_error, reference_loss, spread


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 6)

    def forward(self, x: Any, *_: Any, **__: Any) -> Tensor:
        return torch.tanh(self.out(x * 0.5))


class OfList(Layer):
    def forward(self, x: Any, *_: Any, **__: Any) -> Tensor:
        return super().forward(torch.stack(x).sum(0))


class OfNumbers(Layer):
    def forward(self, x: Any, numbers: Any, *_: Any, **__: Any) -> Tensor:
        rate = numbers["rate"] if isinstance(numbers, dict) else numbers.rate
        return super().forward(x * rate)


class Skipping(Layer):
    """Puts what it was given on a list, or takes it from there."""

    down: bool

    def forward(self, x: Any, skips: Any, *_: Any, **__: Any) -> Tensor:
        if self.down:
            skips.append(x)
        made: Tensor = x + super().forward(x if self.down else skips.pop())
        return made


class OfItself(Layer):
    """Another way to compute where it is given the same tensor twice, as attention has one."""

    def forward(self, x: Any, *_: Any, other: Any = None, **__: Any) -> Tensor:
        return super().forward(x) if other is x else super().forward(x) + self.out(other)


class Dense(nn.Module):
    """Every layer gets all that was made before it."""

    kind: type[Layer] = OfList

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.kind() for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.run(x))
        return logits

    def run(self, x: Tensor) -> Tensor:
        made = [x]
        for layer in self.layers:
            made.append(layer(made))
        return torch.stack(made).sum(0)


class Numbered(Dense):
    kind = OfNumbers

    def run(self, x: Tensor) -> Tensor:
        numbers, other = {"rate": 0.0}, SimpleNamespace(rate=0.0)
        for n, layer in enumerate(self.layers):
            numbers["rate"] = other.rate = n + 1.0
            x = x + layer(x, other if n % 2 else numbers)
        return x


class Skips(Dense):
    kind = Skipping

    def run(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for n, layer in enumerate(self.layers):
            assert isinstance(layer, Skipping)
            layer.down = n < 2
            x = layer(x, skips)
        return x


class Same(Dense):
    kind = OfItself

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, other=x)
        return x


class Accumulating(Dense):
    """Adds to what its layers were given by name, which autograd does not look at."""

    kind = Layer

    def run(self, x: Tensor) -> Tensor:
        x = x * 1.0
        for layer in self.layers:
            x += layer(x=x)
        return x


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, 6), torch.randint(0, 3, (rows,))


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("kind", [Dense, Numbered, Skips, Same])
def test_blocks_are_recomputed_with_the_arguments_of_the_call(
    kind: type[nn.Module], recompute: str
) -> None:
    case = Case(kind, _batch)
    reference, parallel = spread(case, f"recompute={recompute}")
    reference_loss(reference, case, case.batch(4)).backward()
    parallel.forward_backward(case.batch(4))
    assert gradient_error(parallel, reference) < 1e-6


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_arguments_that_are_written_into_later_are_refused(recompute: str) -> None:
    with pytest.raises(PlanError, match="writes in place into what it was given") as error:
        spread(Case(Accumulating, _batch), f"recompute={recompute}")
    assert "`x = x + y` for `x += y`" in str(error.value)
