"""Batch norms on an accelerator: one block of threads for each channel, torch's own and cuDNN's.

They sum over batch and positions in a block of 512 threads (2.11,
torch/aten/src/ATen/native/cuda/Normalization.cuh; cuDNN 9, `bn_bw_1C11_kernel`), so that few
channels leave multiprocessors idle and time follows the elements of a channel: on an H200 the
backward of 64 channels took nearly as long as that of 256, four times as large (1.59 and 1.74 ms).
"""

from __future__ import annotations

from math import ceil

from advisor.cost.calibration import issue_per_s
from advisor.cost.load.work import ProductLoad
from profiles.machine.catalogue import multiprocessors
from profiles.machine.cluster import Device

BLOCKS = 4
"""Blocks of 512 threads on a multiprocessor, which holds 2,048 (1,536 of consumer cards)."""
LANES = 128
BACKWARD = 2.4
"""Cycles of an element in a backward over those of a forward: two sums, and a gradient written.
cuDNN's take 2.5 times the forward's (64 to 512 channels of a ResNet-18 in fp32 on an H200)."""
CUDNN_CYCLES = 1.13
"""Of a block of cuDNN's for an element of a forward, which it reads, sums and writes: the same."""


def block_s(device: Device, norm: ProductLoad, *, cycles: float, forward: bool) -> float:
    """Seconds of the sums of all channels.

    Args:
        norm: m elements of each of n channels.
        cycles: of a block for an element of a forward.
    """
    count = multiprocessors(device.name)
    cycles *= 1.0 if forward else BACKWARD
    if count is None:  # as if channels filled it
        return cycles * norm.m * norm.n * LANES / (BLOCKS * issue_per_s(device))
    clock = issue_per_s(device) / (count * LANES)
    waves = ceil(norm.n / (count * BLOCKS))
    return waves * norm.m * cycles / clock
