"""Tensors that a capture saves for a backward are let go of with it."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from profiles.capture.capture import capture
from profiles.errors import ModelError
from profiles.model.source import CaptureSource


class SideBranch(nn.Module):
    """A softmax, which saves its own output, and one that the loss does not read."""

    def __init__(self, *, is_read: bool) -> None:
        super().__init__()
        self.main, self.side = nn.Linear(8, 8), nn.Linear(8, 8)
        self.is_read = is_read

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        side = self.side(x).softmax(-1)
        main = self.main(x).softmax(-1)
        if self.is_read:
            main = main * float(main.detach().numpy().max())
        return {"main": main, "side": side}


def _loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return (output["main"] - target).square().mean()


def _failing_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    raise ArithmeticError


def _tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


@pytest.mark.parametrize("source", [CaptureSource.FAKE, CaptureSource.RUN])
def test_a_branch_that_no_backward_comes_by_is_freed(source: CaptureSource) -> None:
    model, batch = SideBranch(is_read=source is CaptureSource.RUN), (torch.rand(4, 8),) * 2
    assert capture(model, batch, loss_fn=_loss).source is source  # imports, caches
    before = _tensors()
    capture(model, batch, loss_fn=_loss)
    assert _tensors() == before


def test_a_forward_whose_loss_fails_is_freed() -> None:
    model, batch = SideBranch(is_read=False), (torch.rand(4, 8),) * 2
    with pytest.raises(ModelError):
        capture(model, batch, loss_fn=_failing_loss)
    before = _tensors()
    with pytest.raises(ModelError):
        capture(model, batch, loss_fn=_failing_loss)
    assert _tensors() == before
