"""Copies between the devices of a manually placed module, counted by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiles.capture.capture import capture
from profiles.model.crossings import DeviceCrossing
from profiles.model.profile import Affine, Numerics
from tests.placed import put

FIRST, SECOND = "cuda:0", "cuda:1"
IN, WIDE, OUT, ROWS = 6, 10, 3, 4
FLOAT = 4
Forward = Callable[["Halves", Tensor], Tensor]


class Halves(nn.Module):
    """Two layers on two devices, and what its author wrote between them."""

    def __init__(self, between: Forward, *, devices: tuple[str, str] = (FIRST, SECOND)) -> None:
        super().__init__()
        self.lower = put(nn.Linear(IN, WIDE), devices[0])
        self.upper = put(nn.Linear(WIDE, OUT), devices[1])
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.between(self, x)


def named(model: Halves, x: Tensor) -> Tensor:
    return model.upper(torch.relu(model.lower(x.to(FIRST))).to(SECOND))


def after_the_weights(model: Halves, x: Tensor) -> Tensor:
    return model.upper(torch.relu(model.lower(x)).to(model.upper.weight.device))


def used_twice_there(model: Halves, x: Tensor) -> Tensor:
    hidden = torch.relu(model.lower(x)).to(model.upper.weight.device)
    return model.upper(hidden) + model.upper(hidden)


def there_and_back(model: Halves, x: Tensor) -> Tensor:
    hidden = model.lower(x)
    return model.upper(hidden.to(SECOND)).to(FIRST)


def with_helpers_made_there(model: Halves, x: Tensor) -> Tensor:
    hidden = model.lower(x).to(SECOND)
    scale = torch.arange(WIDE, device=hidden.device) + torch.zeros_like(hidden, device=SECOND)
    return model.upper(hidden * scale)


def looked_at(between: Forward, **options: tuple[str, str]) -> tuple[DeviceCrossing, ...]:
    batch = torch.zeros(ROWS, IN), torch.zeros(ROWS, OUT)
    profile = capture(Halves(between, **options), batch, loss_fn=F.mse_loss)
    return profile.crossings.get(Numerics.AS_BUILT, ())


@pytest.mark.parametrize(
    "between", [named, after_the_weights, used_twice_there, with_helpers_made_there]
)
def test_activations_and_their_gradients_cross_devices(between: Forward) -> None:
    """The target, which starts where the batch does, goes to the loss; no gradient comes of it."""
    (only,) = looked_at(between)
    assert (only.source, only.target) == (FIRST, SECOND)
    assert only.bytes == Affine(per_sample=FLOAT * (WIDE + OUT))
    assert only.back_bytes == Affine(per_sample=FLOAT * WIDE)
    assert (only.copies, only.back_copies) == (2, 1)


def test_each_direction_is_counted_separately() -> None:
    there, back = looked_at(there_and_back)
    assert (there.source, there.target, there.bytes.per_sample) == (FIRST, SECOND, FLOAT * WIDE)
    assert (back.source, back.target, back.bytes.per_sample) == (SECOND, FIRST, FLOAT * OUT)
    assert there.back_copies == back.back_copies == 1


def test_modules_on_the_cpu_count_as_a_device() -> None:
    (only,) = looked_at(after_the_weights, devices=("cpu", FIRST))
    assert (only.source, only.target) == ("cpu", FIRST)
    assert only.back_bytes == Affine(per_sample=FLOAT * WIDE)


def test_a_module_on_one_device_copies_nothing() -> None:
    assert looked_at(after_the_weights, devices=(FIRST, FIRST)) == ()


class Chain(nn.Module):
    """Equal blocks, the last two on another device: which are stood in for is no matter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(6))
        for number, block in enumerate(self.blocks):
            put(block, FIRST if number < 4 else SECOND)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.relu(block(x.to(block.weight.device)))
        return x


def test_equal_blocks_on_several_devices_are_all_captured() -> None:
    profile = capture(Chain(), torch.zeros(ROWS, WIDE))
    (only,) = profile.crossings[Numerics.AS_BUILT]
    assert only.bytes == Affine(per_sample=FLOAT * WIDE)


def test_autocast_halves_the_bytes_across_devices() -> None:
    batch = torch.zeros(ROWS, IN), torch.zeros(ROWS, OUT)
    kinds = (Numerics.AS_BUILT, Numerics.BF16_AUTOCAST)
    profile = capture(Halves(named), batch, loss_fn=F.mse_loss, numerics=kinds)
    whole, half = (profile.crossings[kind][0].back_bytes.per_sample for kind in kinds)
    assert (whole, half) == (FLOAT * WIDE, FLOAT * WIDE / 2)
