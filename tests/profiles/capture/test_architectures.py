"""Captures of unmodified models of many kinds against real runs of them."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from profiles.capture.capture import capture
from profiles.model.profile import ModelProfile, Numerics, UnitCost
from tests.profiles.capture.measured import measure

pytest.importorskip("transformers")

from tests.nightly import half
from tests.zoo import ARCHITECTURES

# What is kept, relative to a real run. Experts get what rows the router gives them, which is not
# known here (Jamba). Whether there is a mask of length times length is known, to the byte.
MASKED = ["BART", *(name for name in ARCHITECTURES if "no cache" in name)]
SAVED = {"Jamba": (-0.001, 0.005), **dict.fromkeys(MASKED, (0.0, 0.0))}
USUAL = (-0.001, 0.001)


@functools.cache
def captured(name: str) -> tuple[nn.Module, ModelProfile]:
    build, batch = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = build()
    return model, capture(model, batch)


def saved_bytes(profile: ModelProfile) -> float:
    costs = (unit.cost(Numerics.AS_BUILT) for unit in profile.units)
    return sum(cost.activation_bytes.at(profile.samples) for cost in costs)


@pytest.mark.parametrize("name", half(ARCHITECTURES, of=3))
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_captured_flop_and_activations_equal_those_of_a_real_run(name: str) -> None:
    model, profile = captured(name)
    measured = measure(model, ARCHITECTURES[name][1])
    assert profile.parameters == sum(p.numel() for p in model.parameters())
    assert profile.flop(profile.samples) == pytest.approx(measured.flop, rel=1e-5)
    low, high = SAVED.get(name, USUAL)
    assert low <= saved_bytes(profile) / measured.saved_bytes - 1 <= high
    assert profile.has_loss


@pytest.mark.parametrize("name", half(ARCHITECTURES, of=3, first=1))
@pytest.mark.filterwarnings("ignore")
def test_a_capture_with_substituted_blocks_equals_one_of_every_block(name: str) -> None:
    model, profile = captured(name)
    every = capture(model, ARCHITECTURES[name][1], every_block=True)
    assert profile.flow == every.flow
    assert (profile.unused, profile.tied) == (every.unused, every.tied)
    for unit, expected in zip(profile.units, every.units, strict=True):
        for quantity in UnitCost.model_fields:
            actual = getattr(unit.cost(Numerics.AS_BUILT), quantity)
            assert actual == getattr(expected.cost(Numerics.AS_BUILT), quantity), (
                unit.name,
                quantity,
            )
