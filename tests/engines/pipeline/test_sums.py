"""Residual streams between units: stages send their sum, and train as one process does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from engines.pipeline.cuts import cuts
from engines.plan import Plan
from tests.engines.cases import CASES, Case, profile_of
from tests.engines.parity import gradient_error, local_rows, reference_loss, relative, spread
from tests.workers import Pool

ROWS, WIDTH = 4, 16


class Stream(nn.Module):
    """Attention-like and feed-forward parts in turns (ViT of `vit-pytorch`), summed by the model;
    one of them writes into the stream."""

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place
        self.enter = nn.Linear(64, WIDTH)
        self.parts = nn.ModuleList(
            # What is changed in place must not be kept for the backward.
            nn.Sequential(
                nn.Tanh() if in_place else nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()
            )
            for _ in range(6)
        )
        self.leave = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.enter(x.flatten(1))
        for number, part in enumerate(self.parts):
            if self.in_place and number != 2:
                x = x.clone() if number == 0 else x
                x += part(x)
            else:
                x = part(x) + x
        output: Tensor = self.leave(x) if self.in_place else self.leave(x + first.relu())
        return output


def case(*, in_place: bool) -> Case:
    return Case(lambda: Stream(in_place=in_place), CASES["resnet-group-norm"].batch)


def test_a_cut_sends_the_stream_and_what_is_taken_beside_it() -> None:
    model = case(in_place=False)
    flow = profile_of(model, model.build()).flow
    plan = Plan.parse("pp=3 schedule=gpipe stages=parts.2,parts.4")
    one, other = cuts(plan, flow, samples=ROWS)
    assert [(t.unit, t.terms) for t in one.tensors] == [("enter", 1), ("parts.1", 2)]
    assert [(t.unit, t.terms) for t in other.tensors] == [("enter", 1), ("parts.3", 4)]
    assert other.forward_bytes == 2 * ROWS * WIDTH * 4
    assert str(other).startswith("cut at parts.4: enter, parts.3 (sum of 4); ")


def _errors(text: str, in_place: bool) -> tuple[float, float, float]:
    subject = case(in_place=in_place)
    reference, parallel = spread(subject, text, rows=ROWS)
    batch = subject.batch(ROWS)
    loss = parallel.forward_backward(local_rows(parallel, batch, ROWS))
    expected = reference_loss(reference, subject, batch)
    expected.backward()  # type: ignore[no-untyped-call]
    gradient = gradient_error(parallel, reference)
    evaluated = parallel.eval_step(local_rows(parallel, batch, ROWS))
    losses = (relative(each, expected.detach()) for each in (loss, evaluated))
    return (*losses, gradient)


PLANS = {
    "gpipe": "pp=4 schedule=gpipe microbatches=2 stages=parts.1,parts.3,parts.4",
    "1f1b": "pp=2 dp_replicate=2 schedule=1f1b microbatches=2 stages=parts.3",
    "interleaved": "pp=2 schedule=interleaved microbatches=2 stages=parts.1,parts.3,parts.5",
    "zero bubble": "pp=2 schedule=zero_bubble microbatches=2 stages=parts.2",
    "zbv": "pp=2 schedule=zbv microbatches=2 stages=parts.1,parts.3,parts.5",
    "sharded": "pp=2 dp_shard=2 schedule=gpipe microbatches=2 stages=parts.3",
    "recomputed": "pp=2 schedule=1f1b microbatches=2 recompute=full stages=parts.3",
}


CHECKED = [(name, False) for name in PLANS]
# Recompute would start from what was changed since.
CHECKED += [(name, True) for name in PLANS if name != "recomputed"]


@pytest.mark.dist
@pytest.mark.parametrize(("name", "in_place"), CHECKED)
def test_stages_that_send_sums_train_as_one_process_does(
    name: str, in_place: bool, pool: Pool
) -> None:
    world = Plan.parse(PLANS[name]).world_size
    for loss, evaluated, gradient in pool.run(_errors, PLANS[name], in_place, world_size=world):
        assert loss < 1e-6
        assert evaluated < 1e-6
        assert gradient < 1e-5


@pytest.mark.dist
def test_a_sum_of_mixed_dtypes_is_sent_in_the_wider_one(pool: Pool) -> None:
    """Autocast makes bf16 of what linear layers return; the stream starts in a norm's fp32."""
    for error in pool.run(_error_of_autocast, world_size=2):
        assert error < 1e-6


class Mixed(Stream):
    def __init__(self) -> None:
        super().__init__()
        # Of an fp32 input, which the batch is, a norm makes fp32, and linear layers bf16.
        self.enter = nn.Sequential(nn.AdaptiveAvgPool1d(WIDTH), nn.LayerNorm(WIDTH))
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x.flatten(1))
        for part in self.parts:
            x = x + part(x)
        output: Tensor = self.leave(x)
        return output


def _error_of_autocast() -> float:
    subject = Case(Mixed, CASES["resnet-group-norm"].batch)
    plan = "pp=2 schedule=gpipe microbatches=1 precision=bf16 stages=parts.2"
    reference, parallel = spread(subject, plan, rows=ROWS)
    batch = subject.batch(ROWS)
    loss = parallel.forward_backward(batch)
    with torch.autocast("cpu", torch.bfloat16):
        expected = reference_loss(reference, subject, batch)
    return relative(loss, expected.detach())
