"""Lookups inside a split unit: what lies between ids and the first split layer learns once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engines.tensor.split_proof import prove_split
from profiles.capture.capture import capture
from tests.engines.cases import Case
from tests.engines.parity import gradient_error, local_rows, reference_loss, spread
from tests.workers import Pool


class Lookup(nn.Module):
    """A table, and a pair of layers that tensor parallelism splits; no input has a gradient."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.up, self.down = table, nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.table(ids)
        out: Tensor = self.down(torch.relu(self.up(rows if rows.ndim == 2 else rows.mean(1))))
        return out


class Recommender(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.lookup, self.head = Lookup(table), nn.Linear(32, 4)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lookup(ids))
        return logits


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(64, (rows, 6), generator=generator), torch.arange(rows) % 4


CASES = {
    "bag": Case(lambda: Recommender(nn.EmbeddingBag(64, 32)), _batch, F.cross_entropy),
    "embedding": Case(lambda: Recommender(nn.Embedding(64, 32)), _batch, F.cross_entropy),
}


PAIRS = (("lookup.up", "column"), ("lookup.down", "row"))


@pytest.mark.parametrize("name", CASES)
def test_a_table_before_split_layers_has_its_whole_gradient_on_every_rank(name: str) -> None:
    case = CASES[name]
    model, sample = case.build(), case.batch(4)
    profile = capture(model, sample, loss_fn=case.loss_fn)
    proof = prove_split(model, sample, PAIRS, size=2, profile=profile, has_target=True)
    assert proof.partial == ()


def _error(name: str) -> float:
    case = CASES[name]
    reference, parallel = spread(case, "tp=2 tensor_styles=lookup.up:column,lookup.down:row")
    batch = case.batch(8)
    reference.zero_grad()
    parallel.optimizer.zero_grad()
    reference_loss(reference, case, batch).backward()
    parallel.forward_backward(local_rows(parallel, batch, 8))
    return gradient_error(parallel, reference)


@pytest.mark.dist
@pytest.mark.parametrize("name", CASES)
def test_a_lookup_gradient_equals_that_of_one_process(name: str, pool: Pool) -> None:
    assert max(pool.run(_error, name, world_size=2)) < 1e-5
