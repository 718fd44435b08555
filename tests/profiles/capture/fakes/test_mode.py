"""Random numbers by which code under capture decides."""

from __future__ import annotations

import torch

from profiles.capture.fakes.mode import EXTREMES


def test_the_extremes_are_the_least_and_the_largest_that_torch_draws() -> None:
    """Of [0, 1) in fp32."""
    one, zero = torch.ones(()), torch.zeros(())
    assert (0, torch.nextafter(one, zero).item()) == EXTREMES
