"""Seconds of batch norms beside those that an H200 took."""

from __future__ import annotations

import pytest

from advisor.cost.calibration import CALIBRATION
from advisor.cost.compute.norms import CUDNN_CYCLES, block_s
from advisor.cost.load.work import ProductLoad
from profiles.machine import catalogue
from profiles.model.work import ProductKind

H200 = catalogue.accelerator("H200-SXM")
IMAGES = 256


def norm(channels: int, edge: int) -> ProductLoad:
    elements = float(IMAGES * edge**2)
    flop = 2 * elements * channels
    return ProductLoad(ProductKind.ELEMENTWISE, elements, channels, 1, 1, flop, 2 * flop, 0.0, 0.0)


def seconds(
    channels: int, edge: int, *, forward: bool, cycles: float = CALIBRATION.norm_cycles
) -> float:
    return block_s(H200, norm(channels, edge), cycles=cycles, forward=forward)


# Kernels of a step of ResNet-50, 256 images in bf16 (torch 2.11.0, profiler).
@pytest.mark.parametrize(
    ("channels", "edge", "forward_s", "backward_s"),
    [
        (64, 112, 2.57e-3, 5.57e-3),
        (64, 56, 0.736e-3, 1.59e-3),
        (256, 56, 0.737e-3, 1.74e-3),
        (128, 28, 0.223e-3, 0.490e-3),
        (512, 28, 0.238e-3, 0.594e-3),
        (1024, 14, 0.135e-3, 0.328e-3),
    ],
)
def test_sums_by_channels_take_what_they_took(
    channels: int, edge: int, forward_s: float, backward_s: float
) -> None:
    assert seconds(channels, edge, forward=True) == pytest.approx(forward_s, rel=0.35)
    assert seconds(channels, edge, forward=False) == pytest.approx(backward_s, rel=0.4)


# cuDNN's kernels of a step of ResNet-18, 128 images in fp32 (torch 2.11.0, cuDNN 9, profiler).
@pytest.mark.parametrize(
    ("edge", "forward_s", "backward_s"),
    [(112, 0.915e-3, 2.315e-3), (56, 0.231e-3, 0.583e-3)],
)
def test_so_do_those_of_cudnn(edge: int, forward_s: float, backward_s: float) -> None:
    half = 128 / IMAGES
    forward, backward = (
        half * seconds(64, edge, forward=way, cycles=CUDNN_CYCLES) for way in (True, False)
    )
    assert forward == pytest.approx(forward_s, rel=0.05)
    assert backward == pytest.approx(backward_s, rel=0.1)


def test_channels_beyond_the_multiprocessors_wait_for_a_second_wave() -> None:
    """132 multiprocessors hold 4 blocks each: 528 channels."""
    whole, more = (seconds(n, 14, forward=True) for n in (528, 529))
    assert more == pytest.approx(2 * whole)
    assert seconds(1, 14, forward=True) == pytest.approx(whole)


def test_a_device_of_unknown_multiprocessors_is_taken_as_full() -> None:
    unknown = H200.model_copy(update={"name": "a new device"})
    known = seconds(528, 14, forward=True)
    cycles = CALIBRATION.norm_cycles
    assert block_s(unknown, norm(528, 14), cycles=cycles, forward=True) == pytest.approx(known)
