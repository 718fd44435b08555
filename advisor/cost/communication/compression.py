"""Gradient compression: bytes sent, time to compress, residuals in memory.

bf16 sends half the bytes. Each rank's part and every sum is rounded by at most 2^-8 of its value.

PowerSGD (Vogels et al. 2019) sends factors of rank r, r (n + m) numbers for a matrix of n x m, in
two consecutive all-reduces, if that is less than half of n m; biases and the rest uncompressed.
The residual is added to the next gradient (error feedback), which takes another copy of all
gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from advisor.cost.compute.rates import matmul_fraction, operation_s, peak_flop_per_s
from engines.plan import Compression, Plan
from profiles.machine.cluster import Device
from profiles.model.profile import UnitProfile

# `min_compression_rate` of torch's PowerSGDState: weaker compressions are not applied.
LEAST_RATE = 2
# Bytes of memory moved for a byte of gradient, counted in torch 2.13's hooks. bf16: a cast, a
# division, a cast back: (4 + 2) + (2 + 2) + (2 + 4) bytes of 4. PowerSGD: the error added (3), a
# copy kept (2), the matrix read for each factor (2) and written from them (1), the new error (3).
BF16_MOVES, POWERSGD_MOVES = 4.0, 11.0
# Operations on a matrix, counted there too: three products, and for every column of a factor its
# norm, a safe divisor and a division, then four to take it out of the others.
PRODUCTS, A_COLUMN = 3, 7


@dataclass(frozen=True, slots=True)
class Sent:
    """Exchange of compressed gradients between replicas in a step.

    Attributes:
        sums_bytes: of all gradients, for each of the consecutive all-reduces of a bucket.
        work_s: to compress and decompress.
        residual_bytes: on the device from step to step, for error feedback.
    """

    sums_bytes: tuple[float, ...]
    work_s: float = 0.0
    residual_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        return sum(self.sums_bytes)


def sent(
    plan: Plan, units: Iterable[UnitProfile], *, gradient_bytes: float, device: Device
) -> Sent:
    """Bytes and work for a replica with these gradients (fp32 if they are compressed)."""
    moves_per_s = device.memory_bandwidth_bytes_per_s.value
    match plan.compression:
        case Compression.NONE:
            return Sent((gradient_bytes,))
        case Compression.BF16:
            return Sent((gradient_bytes / 2,), BF16_MOVES * gradient_bytes / moves_per_s)
    left, right, spared, flop, operations = 0.0, 0.0, 0.0, 0.0, 0
    for shape in (shape for unit in units for shape in unit.shapes):
        if len(shape.sizes) < 2:
            continue
        rows, columns = shape.sizes[0], prod(shape.sizes[1:])
        rank = min(rows, columns, plan.compression_rank)
        if rank * (rows + columns) * LEAST_RATE >= rows * columns:
            continue
        left += shape.count * rank * rows * shape.element_bytes
        right += shape.count * rank * columns * shape.element_bytes
        spared += shape.nbytes * shape.count
        flop += shape.count * PRODUCTS * 2 * rank * rows * columns
        operations += shape.count * (PRODUCTS + A_COLUMN * rank)
    reached = peak_flop_per_s(device, "float32").value * matmul_fraction(device)
    work_s = POWERSGD_MOVES * gradient_bytes / moves_per_s + flop / reached
    work_s += operations * operation_s(device)
    sums = tuple(size for size in (gradient_bytes - spared, left, right) if size)
    return Sent(sums, work_s, residual_bytes=gradient_bytes)
