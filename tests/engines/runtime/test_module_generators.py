"""Generators that modules hold: ranks that split layers draw what one process would."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from engines.apply import apply_plan
from engines.plan import Plan
from profiles.capture.capture import capture
from profiles.errors import RankMismatchError
from tests.engines.cases import cpu_ranks
from tests.engines.parity import sgd, state_error
from tests.workers import Pool

WIDTH, ROWS = 8, 4
PLAN = "tp=2 tensor_styles=blocks.*.up:column,blocks.*.down:row"
SEED_OF_FIRST = 0


class Drawing(nn.Module):
    """Scales by numbers of generators that it holds, also where a function leads to one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        closed = random.Random(seed)
        self.python, self.array = random.Random(seed), [np.random.default_rng(seed)]
        self.torchs = torch.Generator().manual_seed(seed)
        self.draw = lambda: closed.random()

    def forward(self, x: Tensor) -> Tensor:
        scale = self.python.random() + self.array[0].random() + self.draw()
        out: Tensor = self.down(self.up(x).relu())
        return out * (scale + torch.rand((), generator=self.torchs))


class DrawingMore(Drawing):
    """A rank has one more."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        if seed:
            self.another = random.Random(seed)


class Chain(nn.Module):
    def __init__(self, kind: type[Drawing], seed: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind(seed), kind(seed)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def _error(kind: type[Drawing]) -> float | str:
    """Error of the parameters after two steps, of ranks that seed by their number."""
    torch.manual_seed(1)
    reference = Chain(kind, SEED_OF_FIRST)
    model = Chain(kind, dist.get_rank())
    model.load_state_dict(copy.deepcopy(reference.state_dict()))
    batch = torch.randn(ROWS, WIDTH), torch.randint(0, WIDTH, (ROWS,))
    try:
        parallel = apply_plan(
            model,
            Plan.parse(PLAN),
            profile=capture(reference, batch, loss_fn=F.cross_entropy),
            cluster=cpu_ranks(2),
            loss_fn=F.cross_entropy,
            optimizer=sgd,
            sample=batch,
        )
    except RankMismatchError as error:
        return error.what
    optimizer = sgd(list(reference.parameters()))
    for _ in range(2):
        parallel.train_step(batch)
        F.cross_entropy(reference(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state_error(parallel, reference)


@pytest.mark.dist
def test_ranks_that_split_layers_draw_the_first_ones_numbers(pool: Pool) -> None:
    for error in pool.run(_error, Drawing, world_size=2):
        assert isinstance(error, float)
        assert error < 1e-5


@pytest.mark.dist
def test_ranks_with_other_generators_are_refused(pool: Pool) -> None:
    for error in pool.run(_error, DrawingMore, world_size=2):
        assert "random generators" in str(error)
