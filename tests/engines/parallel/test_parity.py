"""Differences of tensors, relative to what they should be."""

from __future__ import annotations

import math

import pytest
import torch

from engines.parallel.parity import TOLERANCES, ZERO, Difference, largest_difference


def test_a_difference_is_relative_to_the_largest_element_of_its_tensor() -> None:
    wanted = {"large": torch.tensor([4.0, -8.0]), "small": torch.tensor([1.0])}
    got = {"large": torch.tensor([4.0, -7.0]), "small": torch.tensor([1.1])}
    difference = largest_difference(got, wanted)
    assert difference.name == "large"
    assert difference.value == pytest.approx(1 / 8)


def test_a_gradient_that_is_zero_but_for_rounding_has_no_size_of_its_own() -> None:
    wanted = {"weight": torch.tensor([1.0]), "bias": torch.tensor([1e-9])}
    got = {"weight": torch.tensor([1.0]), "bias": torch.tensor([3e-9])}
    assert largest_difference(got, wanted).value == pytest.approx(2e-9 / ZERO)


def test_what_one_side_lacks_or_is_not_finite_is_never_within() -> None:
    tolerance = TOLERANCES[torch.float32]
    one, none = {"weight": torch.ones(1)}, dict[str, torch.Tensor]()
    assert largest_difference(one, none) == Difference(math.inf, "weight")
    nan = largest_difference({"weight": torch.tensor([math.nan])}, one)
    assert nan.name == "weight"
    assert not nan.is_within(tolerance)
    assert largest_difference(none, none).is_within(tolerance)
