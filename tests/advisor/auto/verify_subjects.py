"""Factories for `advise verify`: models that train alike under a plan, and some that do not."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Made = tuple[nn.Module, tuple[Tensor, Tensor], Callable[[Tensor, Tensor], Tensor]]


class Classifier(nn.Module):
    """Points (B, 16) to four classes."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.middle = middle or nn.Identity()
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.middle(self.down(torch.relu(self.up(x)))))
        return out


class RankDependent(Classifier):
    """A mistake of its author: ranks scale their outputs differently."""

    def forward(self, x: Tensor) -> Tensor:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return super().forward(x) * (1 + 0.1 * rank)


def _made(module: nn.Module, *, rows: int = 8) -> Made:
    return module, (torch.randn(rows, 16), torch.randint(0, 4, (rows,))), F.cross_entropy


def build() -> Made:
    return _made(Classifier())


def with_batch_norm() -> Made:
    return _made(Classifier(nn.BatchNorm1d(16)))


def with_dropout() -> Made:
    return _made(Classifier(nn.Dropout(0.3)))


def of_one_rank() -> Made:
    return _made(RankDependent())


def of_equal_rows() -> Made:
    module, (points, classes), loss_fn = build()
    return module, (points[:1].repeat(8, 1), classes[:1].repeat(8)), loss_fn


def of_one_row() -> Made:
    return _made(Classifier(), rows=1)


def encoder() -> Made:
    """Norms behind the sums, and ReLUs that a rounding switches on or off."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    sample = torch.randn(8, 16, 128), torch.randn(8, 16, 128)
    return nn.TransformerEncoder(layer, 3), sample, nn.functional.mse_loss
