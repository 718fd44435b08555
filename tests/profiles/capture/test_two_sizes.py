"""Dimensions that sizes leave open are those with which a model runs on twice the rows."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiles.capture.capture import capture
from profiles.capture.two_sizes import why_not_twice
from profiles.errors import BatchError
from profiles.model.profile import Numerics


class WithPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(7, 4), nn.Embedding(32, 4)
        self.head = nn.Linear(4, 7)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = self.head(self.tokens(ids) + self.places(positions))
        return logits.transpose(1, 2)


class LastOfTime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x)[0][-1])
        return out


def ids(rows: int, length: int) -> Tensor:
    return torch.zeros(rows, length, dtype=torch.long)


@pytest.mark.parametrize("rows", [8, 16])  # with 16 the positions are as many as the rows
def test_positions_that_all_samples_share(rows: int) -> None:
    sample = {"ids": ids(rows, 16), "positions": torch.arange(16), "labels": ids(rows, 16)}
    profile = capture(
        WithPositions(),
        sample,
        loss_fn=lambda output, batch: F.cross_entropy(output, batch["labels"]),
    )
    assert (profile.samples, profile.is_proportional) == (rows, False)
    assert profile.batch_dims == {"ids": 0, "labels": 0, "positions": None}
    assert profile.batch_bytes.fixed == 16 * 8
    assert profile.batch_bytes.per_sample == 2 * 16 * 8


def test_time_before_rows() -> None:
    sample = torch.ones(12, 8, 4), torch.zeros(8, dtype=torch.long)
    profile = capture(LastOfTime(), sample, loss_fn=F.cross_entropy)
    assert profile.samples == 8
    assert profile.batch_dims == {"element 0": 1, "element 1": 0}
    forward = sum(unit.cost(Numerics.AS_BUILT).forward_flop.per_sample for unit in profile.units)
    gates, head = 12 * 2 * 4 * 8 * (4 + 8), 2 * 8 * 3  # of a sample, over the whole time
    assert forward == gates + head


def test_tensors_that_disagree_are_refused_with_both_sizes() -> None:
    with pytest.raises(BatchError, match="element 0 has 3, element 1 has 4") as caught:
        capture(nn.Linear(4, 2), (torch.ones(3, 4), ids(4, 1)[:, 0]), loss_fn=F.cross_entropy)
    assert "`batch_dims=`" in str(caught.value)


def test_dimensions_that_are_only_tried_warn_of_nothing() -> None:
    """Of 16 targets for 8 outputs, say, which no batch has."""
    sample = torch.ones(8, 4), torch.ones(8, 1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        F.mse_loss(torch.ones(8, 1), torch.ones(16, 1).narrow(0, 0, 1))
        assert len(seen) == 1  # of torch, in the user's own code
        why_not_twice(nn.Linear(4, 1), sample, F.mse_loss, {"element 0": 0, "element 1": None})
        assert len(seen) == 1
