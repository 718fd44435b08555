"""Parts of `python -m tests.soak`, in small."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.soak.pairs import NOTHING_ALIKE, SavedTraining, largest_difference
from tests.workers import Pool


@pytest.mark.dist
def test_a_training_of_two_ranks_goes_on_alone_with_its_state(pool: Pool, tmp_path: Path) -> None:
    pair = SavedTraining("two", tmp_path / "two", pool).under("one", tmp_path / "one")
    assert pair.differences == ()
    assert (pair.weights, pair.states) == (0.0, 0.0)
    assert pair.losses < 1e-5
    assert pair.steps == 8


@pytest.mark.parametrize(
    ("got", "difference"),
    [
        ({"model.a": torch.tensor([1.0, 2.5])}, 0.5),
        ({"model.a": torch.tensor([1.0, 2.0])}, 0.0),
        ({"model.a": torch.tensor([1.0])}, NOTHING_ALIKE),
        ({"model.a": torch.tensor([1.0, 2.0], dtype=torch.float64)}, NOTHING_ALIKE),
        ({"model.b": torch.tensor([1.0, 2.0])}, NOTHING_ALIKE),
        ({}, NOTHING_ALIKE),
    ],
)
def test_a_state_that_is_another_is_said(got: dict[str, Tensor], difference: float) -> None:
    assert largest_difference({"a": torch.tensor([1.0, 2.0])}, got, "model.") == difference
