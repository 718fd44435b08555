"""Autocast of a user's own loop, around the call of a model under a plan."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.engines.cases import Case
from tests.engines.parity import local_rows, relative, spread
from tests.workers import Pool

WIDTH, ROWS = 16, 8


def _build() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, WIDTH), torch.randint(0, WIDTH, (rows,))


def _measured(plan: str) -> tuple[torch.dtype, float, float]:
    """Dtype of the output, its largest error, and how far one in fp32 is from it."""
    reference, parallel = spread(Case(_build, _batch), plan, rows=ROWS)
    inputs = local_rows(parallel, _batch(ROWS), ROWS)[0]  # type: ignore[index]
    assert isinstance(inputs, Tensor)
    with torch.autocast("cpu", torch.bfloat16):
        output, wanted = parallel(inputs), reference(inputs)
    return output.dtype, relative(output, wanted), relative(reference(inputs), wanted)


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2"])
def test_the_autocast_of_a_loop_is_that_of_the_model_in_it(pool: Pool, plan: str) -> None:
    for dtype, error, of_fp32 in pool.run(_measured, plan, world_size=2):
        assert dtype == torch.bfloat16
        assert error == 0
        assert of_fp32 > 1e-4
