"""Captures for accelerators: which operators are charged beside their bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiles.capture.capture import capture
from profiles.capture.operators.table import moved_bytes
from profiles.model.affine import Affine
from profiles.model.kernel_cycles import CAST, STRIDED
from profiles.model.profile import ModelProfile, Numerics, UnitCost
from profiles.model.work import FusibleKind
from profiles.workload.under_stack import in_channels_last, in_plain_fp32

ROWS, TOKENS, WIDTH = 2, 80, 32
ELEMENTS = TOKENS * WIDTH


class Between(nn.Module):
    """`function` between two layers, so that gradients pass it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.function(self.before(x)))
        return out


def costs(function: Callable[[Tensor], Tensor]) -> list[UnitCost]:
    model, batch = Between(function), torch.ones(ROWS, TOKENS, WIDTH)
    profile = capture(model, batch, on_processor=False)
    return [unit.cost(Numerics.AS_BUILT) for unit in profile.units]


def kernels(function: Callable[[Tensor], Tensor]) -> tuple[int, int]:
    each = costs(function)
    return sum(c.forward_kernels for c in each), sum(c.backward_kernels for c in each)


def added(function: Callable[[Tensor], Tensor], field: str) -> Affine:
    """Of all units, beyond what the layers alone have."""
    fixed = per_sample = 0.0
    for sign, each in ((1, costs(function)), (-1, costs(lambda x: x))):
        fixed += sign * sum(getattr(cost, field).fixed for cost in each)
        per_sample += sign * sum(getattr(cost, field).per_sample for cost in each)
    return Affine(fixed=fixed, per_sample=per_sample)


@pytest.mark.parametrize(
    ("function", "forward", "backward"),
    [
        (lambda x: x * 2.0, 0.0, 0.0),
        (lambda x: x * x, 0.0, 0.0),
        (lambda x: x * torch.ones(WIDTH), STRIDED, STRIDED),
        (lambda x: x + torch.ones(TOKENS, 1), STRIDED, 0.0),
        (lambda x: x.bfloat16().float(), CAST, CAST),
    ],
)
def test_kernels_are_charged_where_they_load_elements_one_at_a_time(
    function: Callable[[Tensor], Tensor], forward: float, backward: float
) -> None:
    """A cast to 16 bits loads vectors, in either direction of the pass."""
    assert added(function, "forward_cycles").per_sample == round(forward * ELEMENTS)
    assert added(function, "backward_cycles").per_sample == round(backward * ELEMENTS)


def test_softmax_is_one_kernel_forward_and_two_backward() -> None:

    def softmax(x: Tensor) -> Tensor:
        return F.softmax(x, dim=-1)

    forward, backward = kernels(lambda x: x)
    assert kernels(softmax) == (forward + 1, backward + 2)
    assert added(softmax, "backward_moved_bytes").per_sample == 6 * 4 * ELEMENTS


def test_a_loss_reads_the_score_of_each_target_alone() -> None:
    """Its gradient is written whole: zeros beside the targets' places."""
    scores, targets = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.long)
    one, aten = torch.zeros(()), torch.ops.aten
    forward = moved_bytes(aten.nll_loss_forward.default, [scores, targets], [one, one])
    assert forward == ROWS * (4 + 8) + 2 * 4
    taken = [one, scores, targets, one]
    backward = moved_bytes(aten.nll_loss_backward.default, taken, [scores])
    assert backward == ROWS * (4 + 8) + 2 * 4 + scores.nbytes


def test_cross_entropy_over_classes_before_positions_waits_for_each_class() -> None:
    """As `F.cross_entropy(logits.transpose(1, 2), targets)` has it; whatever the batch."""

    def along(x: Tensor) -> Tensor:
        return F.log_softmax(x, dim=1)

    assert added(along, "forward_cycles") == Affine(fixed=309_000 * TOKENS)
    assert added(along, "backward_cycles") == Affine(fixed=144_000 * TOKENS)


class Maps(nn.Module):
    """Two convolutions of maps of 8 channels, the second between gradients."""

    def __init__(self, kernel: int, *, groups: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 8, 1, bias=False)
        self.second = nn.Conv2d(8, 8, kernel, padding=kernel // 2, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


MAP = 4 * 8 * 16 * 16  # bytes of one, which a convolution takes, and gives


def turned(model: nn.Module, *, of_lasting: bool = False) -> tuple[float, float, float]:
    """Of the second convolution, forward and backward, as maps turned around it in fp32; and bytes
    of a forward less when they are left as they lie."""
    images = torch.ones(ROWS, 8, 16, 16)
    if of_lasting:
        images = images.to(memory_format=torch.channels_last)
    profile = capture(model, images, on_processor=False)
    cost, plain = (
        next(u for u in p.units if u.name == "second").cost(Numerics.AS_BUILT)
        for p in (profile, in_plain_fp32(profile))
    )
    parts = [cost, *(part for layer in cost.layers for part in (layer.own, layer.after))]
    layouts = [f for part in parts for f in part.fusible if f.kind is FusibleKind.LAYOUT]
    assert not any(
        f.kind is FusibleKind.LAYOUT for layer in plain.layers for f in layer.own.fusible
    )
    spared = cost.forward_moved_bytes.at(ROWS) - plain.forward_moved_bytes.at(ROWS)
    forward = sum(f.forward_moved_bytes for f in layouts)
    return forward, sum(f.backward_moved_bytes for f in layouts), spared / ROWS


@pytest.mark.parametrize("groups", [1, 4])
def test_maps_in_fp32_are_turned_around_convolutions_that_matrix_units_run(groups: int) -> None:
    """Read and written once more, what it takes and what it gives; back, both for each gradient."""
    there = 2 * (MAP + MAP)
    assert turned(Maps(3, groups=groups)) == (there, 2 * there, there)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_group_for_each_channel_is_charged_for_torch_s_own_kernels(stride: int) -> None:
    """An H200 took 1.75 ms forward, 1.22 and 3.04 for the gradients of the input at strides 1 and
    2, and 4.64 for those of the weights, of layers with 2.45, 1.60, 0.85 and 2.45 billion
    multiply-adds; cuDNN's kernels, whose rate the cost model has, would take 8.7 TFLOP/s."""

    class Depthwise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(8, 8, 1, bias=False)
            self.second = nn.Conv2d(8, 8, 5, stride, 2, groups=8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x))
            return out

    profile = capture(Depthwise(), torch.ones(ROWS, 8, 16, 16), on_processor=False)
    cost = next(unit for unit in profile.units if unit.name == "second").cost(Numerics.AS_BUILT)
    products = 8 * (16 // stride) ** 2 * 25  # of a row
    a_second = 132 * 1.98e9  # cycles of an H200's multiprocessors
    cudnns = 2 / 8.7e12

    def charged_s(cycles: float) -> float:
        return cycles / products / a_second

    input_s = {1: 1.22e-3 / 1.60e9, 2: 3.04e-3 / 0.85e9}[stride]
    weight_s = 4.64e-3 / 2.45e9
    assert charged_s(cost.forward_cycles.per_sample) == pytest.approx(
        1.75e-3 / 2.45e9 - cudnns, rel=0.1
    )
    assert charged_s(cost.backward_cycles.per_sample) == pytest.approx(
        input_s + weight_s - 2 * cudnns, rel=0.15
    )
    assert cost.forward_kernels == 2


@pytest.mark.parametrize("groups", [1, 4])
def test_groups_of_several_channels_run_on_matrix_units(groups: int) -> None:
    profile = capture(Maps(3, groups=groups), torch.ones(ROWS, 8, 16, 16), on_processor=False)
    cost = next(unit for unit in profile.units if unit.name == "second").cost(Numerics.AS_BUILT)
    assert cost.forward_cycles == cost.backward_cycles == Affine()


def test_maps_that_a_convolution_lays_out_anew_take_memory_while_it_runs() -> None:
    """Those it takes and those it gives; products of positions take none."""
    own = [
        next(
            unit
            for unit in capture(Maps(kernel), torch.ones(ROWS, 8, 16, 16), on_processor=False).units
            if unit.name == "second"
        ).cost(Numerics.AS_BUILT)
        for kernel in (1, 3)
    ]
    forward = [cost.forward_transient_bytes.at(ROWS) / ROWS for cost in own]
    assert forward[1] - forward[0] == 2 * MAP


def test_products_of_positions_and_maps_that_lie_so_are_not_turned() -> None:
    assert turned(Maps(1)) == (0, 0, 0)
    lasting = Maps(3).to(memory_format=torch.channels_last)
    assert turned(lasting, of_lasting=True) == (0, 0, 0)


class Normed(nn.Module):
    """A convolution, a batch norm and another convolution, of maps of 8 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.norm(self.first(x)).relu())
        return out


def _captured(layout: torch.memory_format) -> ModelProfile:
    images = torch.ones(8, 8, 16, 16).to(memory_format=layout)  # and 16, whose maps lay otherwise
    model = Normed().to(memory_format=layout)
    numerics = (Numerics.AS_BUILT, Numerics.BF16)
    return capture(model, images, numerics=numerics, on_processor=False)


@pytest.mark.parametrize("numerics", [Numerics.AS_BUILT, Numerics.BF16])
def test_maps_said_to_lie_in_channels_last_cost_what_a_capture_of_them_costs(
    numerics: Numerics,
) -> None:
    known, laid_out = _captured(torch.contiguous_format), _captured(torch.channels_last)
    changed = in_channels_last(known)
    assert changed is not None
    assert in_channels_last(laid_out) is None
    for said, seen in zip(changed.units, laid_out.units, strict=True):
        cost, own = said.cost(numerics), seen.cost(numerics)
        assert cost.products == own.products
        for name in (
            *("forward_moved_bytes", "backward_moved_bytes"),
            *("forward_cycles", "backward_cycles"),
        ):
            said_so, ran = getattr(cost, name).at(ROWS), getattr(own, name).at(ROWS)
            assert said_so == pytest.approx(ran, abs=1)  # cycles of each call are rounded


def test_batch_norms_of_channels_last_read_their_maps_once_more() -> None:
    """Forward two are read and one is written, back four and one."""
    (norm,) = (unit for unit in _captured(torch.channels_last).units if unit.name == "norm")
    cost = norm.cost(Numerics.AS_BUILT)
    assert cost.products == ()
    assert cost.forward_moved_bytes.per_sample == 3 * MAP
    assert cost.backward_moved_bytes.per_sample == 5 * MAP
