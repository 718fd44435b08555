"""What networks of convolutions reach of a device: few numbers, fitted to published runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvnetConstants:
    """Physical constants of a training step on one device.

    Attributes:
        tensor_share, vector_share: of the printed peak of matrix units, and of plain float32 units,
            that a convolution reaches whose channels fill the tiles. Above 1 where devices clock
            higher than printed.
        stream_share: of the memory bandwidth in a device's profile that norms, activations and
            additions reach.
        layout_passes: how often a convolution's maps are read and written to bring them into the
            order that matrix units want, where the program keeps channels first.
        element_flop: float32 operations for each element that streams by. Norms of 2-byte maps
            are bound by these on devices with much bandwidth.
        cache_share: what allocator and libraries hold over the tensors, while there is room.
        context_bytes: of the driver, its libraries and the process group.
    """

    tensor_share: float
    vector_share: float
    stream_share: float
    layout_passes: float
    element_flop: float
    cache_share: float
    context_bytes: float


# Calibrated on the rows of published runs with `python -m tests.scorecard.fit_convnets`.
FITTED = ConvnetConstants(
    tensor_share=0.61,
    vector_share=0.88,
    stream_share=0.78,
    layout_passes=0.30,
    element_flop=21.0,
    cache_share=0.22,
    context_bytes=1.0 * 2**30,
)
