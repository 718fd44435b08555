"""Activation checkpointing of a user's code can be left out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from profiles.torch_compat.checkpoint import checkpoints_only, within_one_backward


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


def test_a_parameter_inside_of_a_checkpoint_and_outside_has_its_gradient_once() -> None:
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    handed = []
    weight.register_post_accumulate_grad_hook(lambda of: handed.append(of.grad.clone()))
    with within_one_backward():
        out: Tensor = checkpoint(lambda x: x * weight, weight * 5.0, use_reentrant=True)
    out.sum().backward()  # type: ignore[no-untyped-call]
    assert len(handed) == 1
    assert handed[0].tolist() == [20.0, 30.0]  # of 5 w^2
