"""Buffers that a forward changes: replicas keep those of the first one, as under plain DDP."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from profiles.errors import BatchError
from profiles.torch_compat import without_buffer_sync
from tests.engines.cases import Case
from tests.engines.hungry import hungry_batch
from tests.engines.parity import local_rows, spread
from tests.workers import Pool


class Centred(nn.Module):
    """Subtracts a moving average of what it has seen, which each replica sees other rows of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 5)
        self.register_buffer("average", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.mul_(0.5).add_(x.mean(0), alpha=0.5)
        out: Tensor = self.layer(x - self.average)
        return out


CENTRED = Case(Centred, hungry_batch, F.cross_entropy)


def _averages(plan: str) -> tuple[list[float], list[float], list[float]]:
    """Losses of a rank's rows in four steps: ours, plain DDP's, and those of DDP that sends no
    buffers."""
    reference, parallel = spread(CENTRED, plan)
    batch = local_rows(parallel, hungry_batch(8), 8)
    losses: list[list[float]] = [[], [], []]
    for _ in range(4):
        losses[0].append(parallel.train_step(batch).item())
    for number, options in ((1, {}), (2, without_buffer_sync())):
        runner = DistributedDataParallel(copy.deepcopy(reference), **options)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(runner.parameters(), lr=0.05, momentum=0.9)
        for _ in range(4):
            optimizer.zero_grad()
            loss = F.cross_entropy(runner(batch[0]), batch[1])  # type: ignore[index]
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses[number].append(mean.item() / 2)
    return losses[0], losses[1], losses[2]


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2", "dp_replicate=2 zero=1"])
def test_replicas_train_with_the_buffers_of_the_first(pool: Pool, plan: str) -> None:
    for ours, plain, unsent in pool.run(_averages, plan, world_size=2):
        assert ours == pytest.approx(plain, rel=1e-5)
        assert unsent != pytest.approx(plain, rel=1e-4)


class Scaled(nn.Module):
    """Scales by a buffer that its forward never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 5)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * self.scale
        return out


def _changed_by_the_script(plan: str) -> float:
    """The buffer in a state dict, after a step in which the script changed each rank's."""
    _, parallel = spread(Case(Scaled, hungry_batch, F.cross_entropy), plan)
    parallel.train_step(local_rows(parallel, hungry_batch(8), 8))
    parallel.module.get_buffer("scale").add_(1 + dist.get_rank())
    return float(parallel.state_dict()["scale"])


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2"])
def test_a_state_has_buffers_that_the_script_changed_as_the_first_replica_has_them(
    pool: Pool, plan: str
) -> None:
    assert pool.run(_changed_by_the_script, plan, world_size=2) == [2.0, 2.0]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.layer(x)))
        return out


def test_a_batch_norm_over_one_row_is_explained() -> None:
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        Normed()(torch.zeros(1, 16))
    _, parallel = spread(Case(Normed, hungry_batch, F.cross_entropy), "microbatch_size=4")
    with pytest.raises(BatchError, match="a microbatch of one row cannot be normalised"):
        parallel.train_step(hungry_batch(1))
