"""Parts of `python -m tests.soak`, in small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.soak.pairs import NOTHING_ALIKE, SavedTraining, largest_difference
from tests.soak.waits import waited
from tests.workers import Pool

SAID = {
    "raises": "rank 1 failed: ValueError: of the user's model",
    "worker": r"rank 1 failed: (RuntimeError: DataLoader worker \(pid|Connection\w+Error|EOFError)",
}
"""Patterns. torch says that a worker is lost, or cannot take a batch that it had sent."""


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


@pytest.mark.parametrize("fault", ["raises", "worker"])
def test_a_rank_that_fails_ends_the_other_with_its_name(tmp_path: Path, fault: str) -> None:
    """The worker is one that loads data, and ends without a word."""
    wait = waited("zero3", "dp_shard=2", fault, tmp_path / fault)
    assert wait.differences == ()
    assert wait.named
    assert re.search(SAID[fault], wait.message), wait.message
