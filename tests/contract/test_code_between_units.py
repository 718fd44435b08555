"""Activations of code between units are charged to the pipeline stage whose forward keeps them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from advisor.cost.model import CostModel
from engines.apply import apply_plan
from engines.plan import Plan
from profiles.capture.batch.call import Batch
from profiles.capture.capture import capture
from profiles.model.profile import Numerics
from tests.contract.fake_world import fake_rank
from tests.contract.hybrids import charged_activations, saved_activations
from tests.contract.watch import facts_of
from tests.engines.cases import cpu_ranks

ROWS, CHANNELS, LENGTH = 2, 8, 32


class Gated(nn.Module):
    """Convolutions whose gates, residual sums and skips are code of the model (WaveNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, CHANNELS, 1)
        self.wide = nn.ModuleList(nn.Conv1d(CHANNELS, 2 * CHANNELS, 3, padding=1) for _ in range(4))
        self.narrow = nn.ModuleList(nn.Conv1d(CHANNELS, CHANNELS, 1) for _ in range(4))
        self.head = nn.Conv1d(CHANNELS, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.first(x), []
        for wide, narrow in zip(self.wide, self.narrow, strict=True):
            gate, value = wide(x).chunk(2, 1)
            skips.append(narrow(torch.tanh(value) * torch.sigmoid(gate)))
            x = x + skips[-1]
        output: Tensor = self.head(torch.stack(skips).sum(0).relu())
        return output


class Stream(nn.Module):
    """Parts that the model sums, and a first value that it needs once more at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, CHANNELS, 1)
        self.parts = nn.ModuleList(nn.Conv1d(CHANNELS, CHANNELS, 1) for _ in range(6))
        self.head = nn.Conv1d(CHANNELS, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.first(x)
        for part in self.parts:
            x = x + part(x)
        output: Tensor = self.head(x * first)
        return output


def batch_of(rows: int) -> Batch:
    return torch.randn(rows, 1, LENGTH), torch.randn(rows, 1, LENGTH)


VALUE = ROWS * CHANNELS * LENGTH * 4
"""Bytes of what a convolution of `CHANNELS` hands on."""


@pytest.mark.parametrize(
    ("build", "border", "received"),
    [
        (Gated, "wide.1", 2),
        (Gated, "narrow.1", 4),
        (Gated, "wide.3", 4),
        (Stream, "parts.2", 2),  # the first value and the sum of the others
        (Stream, "parts.5", 2),
    ],
)
def test_a_stage_is_charged_the_code_before_its_units(
    build: type[nn.Module], border: str, received: int
) -> None:
    """Receive buffers are charged for themselves, so that what code takes from them is not; and
    what the first convolution gives is kept on its stage, besides being sent."""
    loss_fn = nn.functional.mse_loss
    plan = Plan.parse(f"pp=2 schedule=gpipe stages={border} microbatch_size={ROWS} microbatches=2")
    profile = capture(build(), batch_of(ROWS), loss_fn=loss_fn)
    costs = CostModel(facts_of(plan, profile))
    for rank, elsewhere in ((0, -VALUE), (1, received * VALUE)):
        with fake_rank(rank, 2):
            parallel = apply_plan(
                build(),
                plan,
                profile=profile,
                cluster=cpu_ranks(2),
                loss_fn=loss_fn,
                optimizer=partial(torch.optim.SGD, lr=0.0),
                sample=batch_of(ROWS),
            )
            parallel.train_step(batch_of(2 * ROWS))
            saved = saved_activations(parallel, batch_of(ROWS))
        assert charged_activations(costs, plan, rank) == saved - elsewhere
    first, last = costs.stages.ends(plan)[:2]
    retained = costs.stages.retained(first, last, numerics=Numerics.AS_BUILT, samples=ROWS)
    assert retained == (0.0, (received - 1) * VALUE)  # what is kept is not counted again
