"""Activation checkpointing of a user's code can be left out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from profiles.torch_compat.checkpoint import checkpoints_only


def runs(*, reentrant: bool, keeps: bool) -> tuple[int, Tensor]:
    """Runs of a function that is checkpointed, forward and backward, and its input's gradient."""
    count = 0

    def cube(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x.sin() ** 3

    x = torch.linspace(0.1, 1.0, 5, requires_grad=True)
    with checkpoints_only(lambda: keeps):
        out: Tensor = checkpoint(cube, x, use_reentrant=reentrant)
    out.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return count, x.grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_not_checkpointed_runs_once_with_the_same_gradient(reentrant: bool) -> None:
    twice, wanted = runs(reentrant=reentrant, keeps=True)
    once, got = runs(reentrant=reentrant, keeps=False)
    assert (twice, once) == (2, 1)
    assert torch.equal(got, wanted)


def test_an_error_passes_through_a_checkpoint_that_is_left_out() -> None:
    def fails(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with checkpoints_only(lambda: False), pytest.raises(KeyError, match="mine"):
        checkpoint(fails, torch.ones(2), use_reentrant=False)
