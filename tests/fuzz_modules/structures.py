"""Structures that are made by hand, since they are not blocks: each is run as a program is."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fuzz_modules.program import CLASSES, ROWS, LossFn

WIDTH, TOKENS = 16, 6


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class Net(nn.Module):
    """Two blocks around one that a subclass makes, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, WIDTH), self.made(), mlp()
        self.head = nn.Linear(WIDTH, CLASSES)

    def made(self) -> nn.Module:
        return mlp()

    def features(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = x + self.middle(x)
        return x + self.last(x)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.features(x).mean(1))


class Compiled(Net):
    """A part is compiled by its author."""

    def made(self) -> nn.Module:
        return torch.compile(mlp(), backend="eager")  # type: ignore[return-value]


class Scripted(Net):
    """A part is TorchScript."""

    def made(self) -> nn.Module:
        return torch.jit.script(mlp())


class Traced(Net):
    """A part is a trace."""

    def made(self) -> nn.Module:
        return torch.jit.trace(mlp(), torch.randn(2, TOKENS, WIDTH))


class FakeQuantized(Net):
    """Quantisation-aware training: observers follow ranges, weights and outputs are rounded."""

    def made(self) -> nn.Module:
        from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

        part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).train()
        part.qconfig = get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
        return prepare_qat(part)


class Penalised(Net):
    """A penalty on the gradient of the output by the input: a backward within the forward."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        x = x.detach().requires_grad_()
        logits = super().forward(x)
        (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        return {"loss": F.cross_entropy(logits, labels) + penalty, "logits": logits}


class Unrolled(Net):
    """An inner step of learning: the gradient by a weight changes that weight (MAML)."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        y = self.features(x).mean(1)
        inner = F.cross_entropy(self.head(y), labels)
        (slope,) = torch.autograd.grad(inner, self.head.weight, create_graph=True)
        logits = F.linear(y, self.head.weight - 0.1 * slope, self.head.bias)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Averaged(Net):
    """A teacher that follows the student by averaging, in the forward (BYOL, DINO)."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
                own.lerp_(other, 0.1)
            wanted = self.teacher(x)
        return self.head((self.features(x) + wanted).mean(1))


class BackwardInForward(Net):
    """A memory that learns by itself: its own backward and its own step, in the forward."""

    def forward(self, x: Tensor) -> Any:
        return self.head((self.features(x) * torch.sigmoid(self._energy(x))).mean(1))

    def _energy(self, x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        self.last(leaf).square().mean().backward(inputs=[leaf])
        assert leaf.grad is not None
        return leaf.grad


STRUCTURES: dict[str, type[Net]] = {
    "plain": Net,
    "torch.compile": Compiled,
    "TorchScript": Scripted,
    "trace": Traced,
    "quantisation-aware": FakeQuantized,
    "gradient penalty": Penalised,
    "inner step": Unrolled,
    "teacher": Averaged,
    "backward in forward": BackwardInForward,
}
OWN_LOSS = (Penalised, Unrolled)


@dataclass(frozen=True)
class Structure:
    """One of `STRUCTURES`, with the ways of a `Program`."""

    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def again(self) -> str:
        return self.name

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript and torch.ao have successors
            return STRUCTURES[self.name]().train()

    def batch(self, number: int) -> Any:
        made = torch.Generator().manual_seed(number)
        x = torch.randn(ROWS, TOKENS, WIDTH, generator=made)
        labels = torch.randint(0, CLASSES, (ROWS,), generator=made)
        return {"x": x, "labels": labels} if self._returns_loss else (x, labels)

    @property
    def loss_fn(self) -> LossFn | None:
        return None if self._returns_loss else F.cross_entropy

    @property
    def _returns_loss(self) -> bool:
        return STRUCTURES[self.name] in OWN_LOSS
