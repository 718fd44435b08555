"""Seconds of convolutional networks: each layer's products and streams on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from advisor.cost.compute import size_efficiency
from advisor.predict.convnet_constants import ConvnetConstants
from profiles.cluster import Device
from profiles.convnets.layers import Block, Kind, Layer

# Libraries compute a product in tiles of this many columns: thinner groups of channels leave the
# rest of a tile idle. (cuDNN and cuBLAS: 64 and 128 wide; the narrower one is taken.)
TILE_COLUMNS = 64
# How often a layer reads or writes a map, forward and backward, kernel by kernel: (of the input, of
# the output) each. Training norms read their input twice, for the moments and to use them.
_PASSES = {
    Kind.NORM: ((2, 1), (2, 3)),  # backward: input and output's gradient twice, then the input's
    Kind.ACTIVATION: ((1, 1), (1, 2)),
    Kind.POOL: ((1, 1), (2, 1)),
    Kind.ADD: ((1, 1), (0, 3)),  # backward: the gradients of the two ways are added up again
    Kind.JOIN: ((1, 1), (1, 1)),
    Kind.RESIZE: ((1, 1), (1, 1)),
}
# cuBLAS 11 took products of any size to the matrix units; PyTorch 1.7 (October 2020) came with it.
ANY_SIZE = 2020.8
# No kernel is shorter: start and end of one on the device. Assumed.
KERNEL_S = 3e-6
# What a compiler joins to the norm or product before it.
_FUSED = (Kind.ACTIVATION, Kind.ADD)


@dataclass(frozen=True, slots=True)
class Numbers:
    """How a program computes: what of the device it uses, and how maps are stored.

    Attributes:
        peak_flop_per_s: of products; `vector_flop_per_s` of everything else.
        is_tensor: products run on matrix units.
        element_bytes: of maps.
        fused: chains of elementwise operations are one kernel, and maps lie as matrix units want
            them; else channels come first.
        any_size: matrix units take products of any size; else 16-bit ones whose depth and columns
            are multiples of 8.
    """

    peak_flop_per_s: float
    vector_flop_per_s: float
    bytes_per_s: float
    is_tensor: bool
    element_bytes: int
    fused: bool
    any_size: bool


@dataclass(frozen=True, slots=True)
class BlockTime:
    """Seconds of a block for one microbatch, and the kernels that it launches."""

    forward_s: float
    backward_s: float
    forward_kernels: int
    backward_kernels: int


def numbers_of(device: Device, dtype: str, *, fused: bool, year: float) -> Numbers:
    """`dtype` as in `Setup`, `year` of the program.

    Where a device is slower in it than in float32 (consumer cards of 2016), libraries compute in
    float32 and store in it.
    """
    vector = device.flop_per_s["float32"].value
    quantity = device.flop_per_s.get(dtype)
    peak = quantity.value if quantity is not None else 0.0
    return Numbers(
        peak_flop_per_s=max(peak, vector),
        vector_flop_per_s=vector,
        bytes_per_s=device.memory_bandwidth_bytes_per_s.value,
        # Matrix units that are no faster than the others (TF32 of consumer cards) are not used.
        is_tensor=dtype != "float32" and peak > vector,
        element_bytes=2 if dtype in ("float16", "bfloat16") else 4,
        fused=fused,
        any_size=year >= ANY_SIZE,
    )


def block_time(
    block: Block, samples: int, numbers: Numbers, constants: ConvnetConstants
) -> BlockTime:
    """One block over `samples` images."""
    forward, backward = [0.0, 0], [0.0, 0]
    for layer in block.layers:
        for total, (seconds, kernels) in zip(
            (forward, backward), _layer(layer, samples, numbers, constants), strict=True
        ):
            total[0] += seconds
            total[1] += kernels
    return BlockTime(forward[0], backward[0], int(forward[1]), int(backward[1]))


def _layer(
    layer: Layer, samples: int, numbers: Numbers, constants: ConvnetConstants
) -> tuple[tuple[float, int], tuple[float, int]]:
    """(seconds, kernels) forward and backward."""
    if layer.kind.is_product:
        one = _product_s(layer, samples, numbers, constants)
        count = 1 if layer.reads_image else 2
        return (one, 1), (count * one, count)
    if numbers.fused and layer.kind in _FUSED:
        return (0.0, 0), (0.0, 0)

    def stream_s(of_input: int, of_output: int) -> float:
        elements = samples * (of_input * layer.inputs + of_output * layer.outputs)
        return _stream_s(elements, numbers, constants)

    forward, backward = _PASSES[layer.kind]
    return (stream_s(*forward), 1), (stream_s(*backward), 1)


def _product_s(layer: Layer, samples: int, numbers: Numbers, constants: ConvnetConstants) -> float:
    """Forward, or the gradient of either operand: as many multiply-adds, over the same maps."""
    odd = numbers.element_bytes == 2 and (layer.depth % 8 or layer.columns % 8)
    is_tensor = numbers.is_tensor and (numbers.any_size or not odd)
    share = constants.tensor_share if is_tensor else constants.vector_share
    peak = numbers.peak_flop_per_s
    if numbers.is_tensor and not is_tensor:
        peak = numbers.vector_flop_per_s
    filled = layer.columns / (ceil(layer.columns / TILE_COLUMNS) * TILE_COLUMNS)
    flop = float(samples * layer.forward_flop)
    computing = flop / (peak * share * filled * size_efficiency(flop, peak))
    elements = samples * (layer.inputs + layer.outputs)
    moved = elements + layer.parameters
    moving = moved * numbers.element_bytes / (numbers.bytes_per_s * constants.stream_share)
    seconds = max(computing, moving, KERNEL_S)
    if is_tensor and not numbers.fused and layer.kind is Kind.CONVOLUTION:
        seconds += (
            constants.layout_passes
            * 2
            * elements
            * numbers.element_bytes
            / (numbers.bytes_per_s * constants.stream_share)
        )
    return seconds


def _stream_s(elements: float, numbers: Numbers, constants: ConvnetConstants) -> float:
    moving = elements * numbers.element_bytes / (numbers.bytes_per_s * constants.stream_share)
    computing = elements * constants.element_flop / numbers.vector_flop_per_s
    return max(moving + computing, KERNEL_S)


def total(times: Sequence[BlockTime]) -> BlockTime:
    """All blocks as one."""
    return BlockTime(
        sum(time.forward_s for time in times),
        sum(time.backward_s for time in times),
        sum(time.forward_kernels for time in times),
        sum(time.backward_kernels for time in times),
    )
