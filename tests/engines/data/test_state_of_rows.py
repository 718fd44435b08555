"""Buffers that a forward changes by the rows that it sees: codebooks, queues, means."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engines.data.loss_parts import seen_on
from profiles.capture.capture import capture
from tests.engines.data.test_loss_parts import (
    ROWS,
    WIDTH,
    Tagger,
    batch,
    over_a_mask,
    seen,
    warnings_of,
)
from tests.workers import Pool


class Codes(Tagger):
    """Counts its calls, and keeps a mean over all that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("mean").lerp_(x.mean((0, 1)), 0.1)
        self.get_buffer("calls").add_(1)
        return super().forward(x)


def test_buffers_that_depend_on_the_rows_are_seen_and_counts_are_none() -> None:
    torch.manual_seed(0)
    model, sample = Codes(), batch(ROWS)
    profile = capture(model, sample, loss_fn=over_a_mask)
    shown = seen_on(model, sample, over_a_mask, profile=profile, said=None)
    assert shown.state_of_rows == "the forward changes `mean` by the rows that it sees"
    assert not shown.state  # no loss depends on it
    assert not seen(over_a_mask).state_of_rows


@pytest.mark.dist
def test_buffers_that_replicas_change_by_their_own_rows_are_warned_of(pool: Pool) -> None:
    for plan, count in (("dp_shard=2", 2), ("dp_replicate=2 accumulation=2", 4)):
        first, second = pool.run(warnings_of, plan, Codes, over_a_mask, world_size=2)
        assert len(first) == 1
        assert "changes `mean` by the rows that it sees" in first[0]
        assert f"Each of the {count} parts of a global batch" in first[0]
        assert not second
