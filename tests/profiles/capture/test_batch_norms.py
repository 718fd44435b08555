"""Batch norms in a profile: noted with the elements of all their passes."""

from __future__ import annotations

import torch
from torch import nn

from profiles.capture.capture import capture
from profiles.model.profile import Numerics
from profiles.model.work import Product, ProductKind

CHANNELS, EDGE = 4, 8
ELEMENTS = CHANNELS * EDGE * EDGE


def norms(model: nn.Module) -> list[Product]:
    """Of one unit, or layer by layer."""
    profile = capture(model.train(), torch.ones(2, 3, EDGE, EDGE), numerics=list(Numerics))
    costs = [unit.cost(Numerics.AS_BUILT) for unit in profile.units]
    stretches = [part for c in costs for layer in c.layers for part in (layer.own, layer.after)]
    products = [p for part in (*costs, *stretches) for p in part.products]
    return [p for p in products if p.kind is ProductKind.ELEMENTWISE]


def test_a_norm_of_a_convolution_is_noted_with_its_channels() -> None:
    (norm,) = norms(nn.Sequential(nn.Conv2d(3, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS)))
    assert (norm.m.at(1), norm.n) == (ELEMENTS / CHANNELS, CHANNELS)
    assert norm.forward_bytes is not None
    assert norm.forward_bytes.at(1) == 2 * 4 * ELEMENTS
    assert norm.backward_bytes is not None
    assert norm.backward_bytes.at(1) == 3 * 4 * ELEMENTS


def test_a_norm_by_running_statistics_is_not() -> None:
    class Frozen(nn.BatchNorm2d):
        """As detectors hold it."""

        def train(self, mode: bool = True) -> nn.BatchNorm2d:
            return super().train(False)

    frozen = nn.Sequential(nn.Conv2d(3, CHANNELS, 3, padding=1), Frozen(CHANNELS))
    assert norms(frozen) == []


def test_other_norms_and_norms_without_a_gradient_are_not() -> None:
    frozen = nn.Sequential(nn.BatchNorm2d(3, affine=False), nn.Conv2d(3, CHANNELS, 3, padding=1))
    assert norms(frozen) == []
    assert norms(nn.Sequential(nn.Conv2d(3, CHANNELS, 1), nn.GroupNorm(2, CHANNELS))) == []
