"""Random numbers in a pipeline: what one stage drew is what all stages see."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.engines.cases import CASES, Case
from tests.engines.parity import gradient_error, profile_of, reference_loss, relative, spread
from tests.workers import Pool

ROWS = 4
PLAN = "pp=2 schedule=gpipe microbatches=2 stages=last"


class Mask(nn.Module):
    """ViT MAE's way: a mask of random places, made of nothing that is learned."""

    def forward(self, x: Tensor) -> Tensor:
        return (torch.rand(x.shape[0], 16) > 0.5).to(x.dtype)


class Masked(nn.Module):
    """The mask is used before and after the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = Mask()
        self.first = nn.Linear(64, 16)
        self.last = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask(x)
        out: Tensor = self.last(self.first(x.flatten(1)) * mask - mask)
        return out


CASE = Case(Masked, CASES["resnet-group-norm"].batch)


def _errors() -> tuple[float, float]:
    reference, parallel = spread(CASE, PLAN, rows=ROWS)
    batch = CASE.batch(ROWS)
    torch.manual_seed(5)  # the first stage draws as one process does
    loss = parallel.forward_backward(batch)
    torch.manual_seed(5)
    assert isinstance(batch, tuple)
    halves = zip(*(tensor.chunk(2) for tensor in batch), strict=True)
    expected = sum((reference_loss(reference, CASE, half) for half in halves), torch.zeros(())) / 2
    expected.backward()  # type: ignore[no-untyped-call]
    return relative(loss, expected.detach()), gradient_error(parallel, reference)


def test_random_numbers_of_a_unit_cross_the_cut() -> None:
    flow = profile_of(CASE, CASE.build()).flow
    position = flow.first_call("last")
    assert position is not None
    crossing = [flow.calls[call].unit for *_, (call, _) in flow.crossing_terms(position)]
    assert crossing == ["mask", "first"]


@pytest.mark.dist
def test_both_stages_use_the_same_mask(pool: Pool) -> None:
    for loss, gradient in pool.run(_errors, world_size=2):
        assert loss < 1e-6
        assert gradient < 1e-6
