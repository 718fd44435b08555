"""Errors of torch in a forward say what the plan has to do with them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from profiles.errors import ModelError
from tests.engines.cases import Case
from tests.engines.parity import local_rows, spread
from tests.workers import Pool

ROWS, WIDTH = 4, 8


class Scaled(nn.Module):
    """A factor in fp32, kept as a buffer, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale
        assert isinstance(scale, Tensor)
        out: Tensor = self.second(self.first(x) * scale)
        return out


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Scaled(), Scaled())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x).mean(1)
        return out


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, WIDTH), torch.zeros(rows)


def _said(plan: str) -> str:
    case = Case(Stack, _batch, loss_fn=nn.functional.mse_loss)
    _, parallel = spread(case, plan, rows=ROWS)
    try:
        parallel.train_step(local_rows(parallel, _batch(ROWS), ROWS))
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_two_dtypes_in_an_operation_are_explained_where_weights_are_cast(pool: Pool) -> None:
    """torch says that `mat1 and mat2 must have the same dtype`; autocast casts both."""
    for said in pool.run(_said, "dp_shard=2 precision=bf16", world_size=2):
        assert "an operation got two dtypes: mat1 and mat2 must have the same dtype" in said
        assert "test_explained.py:" in said
        assert "hint: cast it where it is used" in said
    assert pool.run(_said, "dp_replicate=2 precision=bf16", world_size=2) == ["", ""]
