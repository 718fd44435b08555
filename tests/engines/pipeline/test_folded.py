"""Patches folded into the batch between convolutions and attention, as MobileViT does it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.apply import Proofs, apply_plan
from engines.data.loader import split_rows_evenly
from engines.parallel.parity import relative_errors
from engines.plan import Plan
from engines.tensor.proposal import propose_styles
from profiles.capture.batch.call import Batch
from profiles.capture.batch.rows import split_rows
from tests.engines.cases import Block, Case, cpu_ranks, profile_of
from tests.engines.parity import reference_loss
from tests.matrix.cell import TOLERANCE
from tests.workers import Pool

WIDTH, PATCH, ROWS = 16, 2, 8


class Hybrid(nn.Module):
    """Convolution, attention over the pixels of equal place in all patches, convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = _convolution(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, 4) for _ in range(2))
        self.leave = _convolution(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        rows, width, height, _ = x.shape
        side = height // PATCH
        tokens = x.view(rows, width, side, PATCH, side, PATCH).permute(0, 3, 5, 2, 4, 1)
        tokens = tokens.reshape(rows * PATCH**2, side**2, width)
        for block in self.blocks:
            tokens = block(tokens)
        x = tokens.view(rows, PATCH, PATCH, side, side, width).permute(0, 5, 3, 1, 4, 2)
        out: Tensor = self.leave(x.reshape(rows, width, height, height))
        return out


class HybridNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = _convolution(1, WIDTH)
        self.stages = nn.ModuleList(Hybrid() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def _convolution(taken: int, given: int) -> nn.Sequential:
    layer = nn.Conv2d(taken, given, 3, padding=1, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(given), nn.SiLU())


def _batch(rows: int) -> Batch:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 1, 8, 8, generator=generator), torch.arange(rows) % 5


CASE = Case(HybridNet, _batch, F.cross_entropy)


def _errors(text: str) -> tuple[float, float]:
    """Beside one process that takes the same microbatches: batch norms see each by itself."""
    plan, batch = Plan.parse(text), _batch(ROWS)
    model = CASE.build()
    reference, profile = copy.deepcopy(model), profile_of(CASE, model, ROWS)
    split = propose_styles(model, batch, size=plan.tp, profile=profile, has_target=True)
    parallel = apply_plan(
        model,
        plan.model_copy(update={"tensor_styles": split.styles}),
        profile=profile,
        cluster=cpu_ranks(plan.world_size),
        loss_fn=CASE.loss_fn,
        sample=batch,
        proofs=Proofs(layers=split.proof),
    )
    wanted = 0.0
    for piece in split_rows(batch, split_rows_evenly(ROWS, plan.forwards)):
        loss = reference_loss(reference, CASE, piece) / plan.forwards
        loss.backward()
        wanted += loss.item()
    loss = parallel.forward_backward(batch)
    gradients = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    errors = relative_errors(parallel.full_gradients(), gradients)
    return abs(loss.item() - wanted) / wanted, max(errors.values())


@pytest.mark.dist
def test_stages_of_split_layers_train_on_microbatches_like_one_process(pool: Pool) -> None:
    plan = "pp=2 tp=2 schedule=1f1b microbatches=2 stages=stages.1"
    for loss, gradient in pool.run(_errors, plan, world_size=4, timeout_s=120.0):
        assert loss < TOLERANCE
        assert gradient < TOLERANCE
