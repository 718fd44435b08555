"""Models of which a part is under a plan: refused before ranks wait for each other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from advisor import auto_parallelize
from profiles.errors import ModelError
from tests.engines.cases import cpu_ranks
from tests.workers import Pool

WIDTH = 16


class Shared(nn.Module):
    """A head of its own on an encoder that others have too."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(x))
        return out


def _refusals(plan: str) -> list[str]:
    """Of another model with a module that is under a plan, and of the first one again."""
    encoder = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    first, other = Shared(encoder), Shared(encoder)
    messages = []
    for model in (first, other, first):
        try:
            auto_parallelize(
                model,
                sample=(torch.randn(4, 8), torch.randint(0, 4, (4,))),
                loss_fn=F.cross_entropy,
                plan=plan,
                cluster=cpu_ranks(2),
                learns=False,
            )
        except ModelError as error:
            messages.append(error.what)
    return messages


@pytest.mark.dist
@pytest.mark.parametrize(
    "plan", ["dp_replicate=2", "dp_shard=2", "tp=2", "pp=2 schedule=naive stages=head"]
)
def test_a_model_of_which_a_part_is_under_a_plan_is_refused(pool: Pool, plan: str) -> None:
    for other, again in pool.run(_refusals, plan, world_size=2):
        assert "`encoder` in the model is parallel already" in other
        assert "the model is parallel already" in again
