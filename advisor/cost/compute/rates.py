"""Rates of a device: products by size, memory traffic and launches."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import log

from advisor.cost.calibration import (
    CALIBRATION,
    ROW_BYTES,
    Calibration,
    column_share,
    elements_a_load,
    issue_per_s,
    tile_share,
)
from advisor.cost.compute.attention import computed_share, drawn
from advisor.cost.compute.norms import CUDNN_CYCLES, LANES, block_s
from advisor.cost.compute.waves import wave_share
from advisor.cost.load.casts import EAGER, FUSED, Casts, cast_count, cast_elements, is_cast
from advisor.cost.load.work import ELEMENT_BYTES, AttentionLoad, ProductLoad
from advisor.inputs.stacks import convolves_in_tf32
from profiles.machine.cluster import Device
from profiles.model.work import AttentionKernel, ProductKind
from profiles.provenance import Quantity
from profiles.workload.stack import Stack

# Efficiency of a matrix product by its size, as a fraction of what large ones reach. Calculon,
# systems/a100_80g.json: 0.95 from 128 GFLOP on, 0.9 at 16, 0.6 at 1, 0.1 at 0. Read as *time at
# peak* on that device (312 TFLOP/s), so that the curve carries over to slower and faster ones.
CURVE_PEAK_FLOP_PER_S = 312e12
CURVE = ((0.0, 0.1), (1e9, 0.6), (16e9, 0.9), (128e9, 0.95))


# Best rate of 8-bit products over twice that of bfloat16 ones (ml-engineering, maximum achievable
# matmul, TFLOP/s: H100 1403 over 2 x 795, H200 1453, GH200 1535 over 2 x 829; B200 3433 over
# 2 x 1745, B300 3353 over 2 x 1769, GB200 3616 over 2 x 1822).
NARROW_SHARE, NARROW_SHARE_OF_BLACKWELL = 0.9, 0.97
_BLACKWELL = ("B100", "B200", "B300", "GB")
# Host time of Python code over that of a kernel on an accelerator, whose launch has a driver's call
# too: 14 us of 34 (an H200; both in steps of `profiles.machine.bench.small_step`).
PYTHON_SHARE = 0.42
# Of each element of an operand that is cast to 8 bits: two bytes read, one written, one transposed.
NARROW_BYTES = 4
# Host time of an operation by itself on a processor, over that of a kernel of a step, which also
# has a module's call, a node of autograd and its backward: 3 us of 14 (torch 2.13; `add_` in a
# loop, the operations of PowerSGD's hook).
PLAIN_OPERATION = 0.2
# Of one on a DTensor: it goes through torch's dispatcher in Python (torch 2.13: AdamW's nine
# operations take 25 us a parameter, of shards 122: `python -m tests.benchmarks.shard_host`). Our
# engines step a rank's own tensors of shards for torch's elementwise optimizers, at 2 us more than
# plain ones.
SHARD_OPERATION = 0.95
# The same of a tensor in a list: 19 us a parameter of AdamW's nine operations and 4.7 of SGD's
# three on an H200's host whose kernels take 41 (torch 2.11, 100 small parameters;
# `make gpu`, part b, host work).
LISTED_OPERATION = 0.05
# Host time of an update and of a step's own work, by launches, whatever the parameters: 0.4 ms, the
# mean of what 15 small programs took beyond their launches on that H200.
UPDATE_LAUNCHES = 10
# Bytes that a convolution moves on a processor beside its own: oneDNN copies maps and weights into
# blocks of channels and the result back, each read and written, in both products of a backward
# (`ONEDNN_VERBOSE=1` lists them). In a bench of a processor a convolution of small maps took up to
# four times what it multiplies for.
REORDERED = 2
# Of a core in fp32: two fused multiply-adds of eight elements (AVX2, FMA). Cores with wider units
# have more, and count as more cores.
FLOP_PER_CYCLE = 32
# Scores, and values weighed by them.
PRODUCTS_OF_ATTENTION = 2


def peak_flop_per_s(device: Device, dtype: str) -> Quantity:
    """Dense peak for `dtype`; a CPU without an entry uses its float32 rate.

    Processors without matrix units convert bf16 to fp32, so no faster; legality refuses dtypes that
    an accelerator lacks.
    """
    rates = device.flop_per_s
    if dtype == "float4" and dtype not in rates and "float8_e4m3fn" in rates:
        # Twice the 8-bit rate, as for all devices with both.
        eight = rates["float8_e4m3fn"]
        return eight.model_copy(update={"value": 2 * eight.value})
    if dtype.startswith("float8") and dtype not in rates:
        return rates.get("bfloat16") or rates["float32"]
    return rates.get(dtype) or rates["float32"]


def matmul_fraction(device: Device, calibration: Calibration = CALIBRATION) -> float:
    """Share of the peak that large products reach inside a step."""
    return calibration.matmul_share(device)


def size_efficiency(flop: float, peak: float) -> float:
    """Share of the best matmul rate for a product of `flop`, 0.11 to 1."""
    size = flop / peak * CURVE_PEAK_FLOP_PER_S
    best = CURVE[-1][1]
    for (small, low), (large, high) in pairwise(CURVE):
        if size < large:
            return (low + (high - low) * (size - small) / (large - small)) / best
    return 1.0


def product_efficiency(device: Device, flop: float, peak: float) -> float:
    """`size_efficiency` as measured on an accelerator, else the curve.

    Interpolated between measured sizes by the logarithm of their FLOP; beside the matrix units, on
    which the bench multiplies, sizes that take as long are as good. Not on CPUs: there a small
    product's time is mostly its launch, which is charged separately.
    """
    if not device.matmul_efficiency or device.kind == "cpu":
        return size_efficiency(flop, peak)
    if peak <= device.flop_per_s["float32"].value:
        flop *= peak_flop_per_s(device, "bfloat16").value / peak
    points = [(2.0 * edge**3, share.value) for edge, share in device.matmul_efficiency.items()]
    points.sort()
    if flop <= points[0][0]:
        return points[0][1]
    for (small, low), (large, high) in pairwise(points):
        if flop < large:
            return low + (high - low) * log(flop / small) / log(large / small)
    return points[-1][1]


def operation_s(device: Device) -> float:
    """Host seconds of an operation outside modules and autograd, as in hooks."""
    return device.launch_s.value * (PLAIN_OPERATION if device.kind == "cpu" else 1.0)


def new_memory_s(device: Device, nbytes: float) -> float:
    """Seconds of a processor to map bytes anew, beyond writing them; 0 where no bench was run."""
    rate = device.new_memory_bytes_per_s
    return nbytes / rate.value if rate is not None else 0.0


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Rates of a device under one stack.

    Attributes:
        peak: of products with weights in the plan's dtype, FLOP/s; `half` of 16-bit ones.
        bandwidth: bytes/s of operands of products; `elementwise` of all other kernels, at the
            average of torch's own; `vectors` of those that load vectors, where kernels are torch's
            and others are charged for (`profiles.model.kernel_cycles`).
        operand_bytes: of an element of a product's factors; those of 8 bits are cast from 16.
        casts: to 8 bits by kernels of their own; `others` are the rates of products without them.
        convolutions: rates of those, where they run in TF32 and other products in fp32.
        launch_s: what a kernel takes of the host; `waits` for each to end before the next.
        has_own_norms: batch norms are torch's kernels, not cuDNN's (torch 2.11,
            torch/aten/src/ATen/native/Normalization.cpp: bf16).
    """

    device: Device
    peak: float
    half: float
    bandwidth: float
    elementwise: float
    launch_s: float
    waits: bool
    calibration: Calibration
    operand_bytes: int = 2
    is_narrow: bool = False
    vectors: float | None = None
    casts: Casts | None = None
    others: DeviceRates | None = None
    convolutions: DeviceRates | None = None
    has_own_norms: bool = False

    @classmethod
    def of(
        cls,
        device: Device,
        dtype: str,
        stack: Stack,
        calibration: Calibration,
        *,
        charges_kernels: bool = False,
    ) -> DeviceRates:
        """Rates for a plan of this dtype; `charges_kernels`: a profile counts their cycles."""
        half = peak_flop_per_s(device, dtype if dtype in _WIDE else "bfloat16").value
        is_narrow = dtype.startswith(("float8", "float4"))
        is_apart = is_narrow and stack.casts_apart
        if dtype == "float16":
            half = peak_flop_per_s(device, dtype).value
        is_cpu = device.kind == "cpu"
        is_eager = not (stack.compiled or stack.fused)
        by_kernel = charges_kernels and is_eager and not is_cpu
        own = functools.partial(cls.of, device, charges_kernels=charges_kernels)
        # If 16 bits are slower than 32 (Pascal's consumer cards), libraries convert operands.
        plain = device.flop_per_s["float32"].value
        return cls(
            device=device,
            peak=max(plain, peak_flop_per_s(device, dtype).value),
            half=max(plain, half),
            bandwidth=calibration.bandwidth_bytes_per_s(device),
            elementwise=calibration.elementwise_bytes_per_s(device, is_eager=is_eager),
            vectors=device.memory_bandwidth_bytes_per_s.value if by_kernel else None,
            launch_s=device.launch_s.value
            * stack.host_work
            * (1.0 if is_cpu else calibration.launch * (1 - stack.cuda_graphs)),
            waits=stack.blocking_launches,
            calibration=calibration,
            operand_bytes=4 if dtype in _WIDE else 2,
            is_narrow=is_narrow,
            casts=(FUSED if stack.compiled else EAGER) if is_apart else None,
            others=own("bfloat16", stack, calibration) if is_apart else None,
            convolutions=own("tfloat32", stack, calibration)
            if dtype == "float32" and convolves_in_tf32(stack, device)
            else None,
            has_own_norms=dtype == "bfloat16",
        )

    def cast_kernels(self, products: Iterable[ProductLoad], *, forward: bool) -> float:
        """Kernels that cast factors to 8 bits in a forward, or in a backward."""
        if self.casts is None:
            return 0.0
        cast = (cast_count(each, forward=forward) for each in products if is_cast(each))
        return self.casts.kernels * sum(cast)

    def moving_s(self, moved_bytes: float, cycles: float) -> float:
        """Seconds of kernels that are no products: of their bytes, and of cycles beside them; all
        at their average rate where nobody counted an accelerator's."""
        if self.vectors is None:
            return moved_bytes / self.elementwise + self.core_s(cycles)
        return moved_bytes / self.vectors + cycles * LANES / issue_per_s(self.device)

    def core_s(self, cycles: float) -> float:
        """Seconds of cycles of a core, shared out among those of a processor; they are as fast as
        its products say."""
        is_cpu = self.device.kind == "cpu"
        return cycles * FLOP_PER_CYCLE / (self.vector_peak * self._best_share()) if is_cpu else 0.0

    def product_s(self, product: ProductLoad, flop: float, moved_bytes: float) -> float:
        """Seconds of a product.

        Arithmetic and reads overlap; before Hopper, writes of results follow the whole sum. On a
        processor neither do: operands are copied into blocks before they are multiplied. Out of no
        cache products took twice their bytes at the median, beside arithmetic; in a step some
        are in one (`python -m tests.benchmarks.core_cycles`). Of convolutions see `REORDERED`.
        """
        if not flop:
            return 0.0
        if self.convolutions is not None and product.is_convolution:
            return self.convolutions.product_s(product, flop, moved_bytes)
        if self.others is not None and not is_cast(product):
            return self.others.product_s(product, flop, moved_bytes)
        if product.kind is ProductKind.ELEMENTWISE:
            return self._norm_s(product, moved_bytes, forward=flop == product.forward_flop)
        if product.kind is ProductKind.CONVOLUTION and self.device.kind != "cpu":
            forward = flop == product.forward_flop
            return self._convolution_s(product, flop, moved_bytes, forward=forward)
        is_wide = product.is_wide and self.operand_bytes < WIDE_BYTES
        peak = self.half if product.kind is ProductKind.SCORES else self.peak
        if is_wide:
            peak = self.vector_peak
        one = 2 * product.m * product.n * product.k
        if product.kind is not ProductKind.LINEAR and self.device.kind != "cpu":
            one *= product.repeats  # one kernel, whose tiles fill the device together
        share = product_efficiency(self.device, one, peak)
        if self.device.kind != "cpu":
            forward = flop == product.forward_flop
            waves = wave_share(self.device, product, forward=forward)
            # If the number of multiprocessors is unknown, expert rows still fill whole tiles.
            share = min(share, waves) if waves else share * tile_share(product.m, product.kind)
        share *= self.calibration.product_share(product.n, product.k, product.kind, self.device)
        if product.is_convolution:
            share *= self._backward_share(forward=flop == product.forward_flop)
        best = self.calibration.vector_share(self.device) if is_wide else self._best_share()
        reached = peak * best * share
        by_weight = self.has_units and product.kind is ProductKind.LINEAR
        width = elements_a_load(product.n, product.k, self.operand_bytes)
        if by_weight and width * self.operand_bytes < ROW_BYTES:
            loaded = self.calibration.odd * self.device.odd * issue_per_s(self.device)
            reached = min(reached, width * loaded)
        exposed = min(moved_bytes, _written(product, flop))
        if self.device.kind == "cpu":
            exposed = 0.0 if product.is_convolution else moved_bytes
        elif self.device.is_hopper_or_later and not is_wide:
            # Blocks of threads stay for tile after tile, and one is written while the next is
            # computed: on an H200 large products take their arithmetic's time (`make gpu`, layers).
            exposed = 0.0
        moved_bytes -= exposed
        seconds = max(flop / reached, moved_bytes / self.bandwidth)
        if self.is_narrow and product.kind is not ProductKind.SCORES:
            # Operands are cast, as they are and transposed: two bytes read and two written of each
            # of the activations forward, of the gradients backward.
            operand = product.k if flop == product.forward_flop else product.n
            later = self.device.name.startswith(_BLACKWELL)
            best = NARROW_SHARE_OF_BLACKWELL if later else NARROW_SHARE
            seconds = max(seconds / best, moved_bytes / self.bandwidth)
            if self.casts is None:
                seconds += NARROW_BYTES * product.m * operand * product.repeats / self.bandwidth
            else:
                elements = cast_elements(product, forward=flop == product.forward_flop)
                seconds += self.casts.moved_bytes * elements / self.elementwise
        if product.is_convolution and self.device.kind == "cpu":
            products = flop / product.forward_flop
            exposed += REORDERED * products * product.forward_bytes
        return seconds + exposed / self.bandwidth

    def attention_s(self, call: AttentionLoad, *, forward: bool) -> float:
        """Seconds of a call's products; a processor's kernel has cycles beside them."""
        flop = call.forward_flop if forward else call.backward_flop
        is_processors = call.kernel is AttentionKernel.CPU
        peak = self.peak if is_processors else self.half
        if is_processors or call.kernel.keeps_scores:
            share = matmul_fraction(self.device, self.calibration)
            share *= product_efficiency(self.device, flop / PRODUCTS_OF_ATTENTION, peak)
        else:
            share = self.calibration.attention_share(self.device, call.kernel, width=call.width)
            pace = min(1.0, peak / peak_flop_per_s(self.device, "bfloat16").value)
            share *= computed_share(call, self.device, forward=forward, pace=pace)
            drawing = drawn(call, forward=forward) / issue_per_s(self.device)
            nbytes = call.forward_bytes if forward else call.backward_bytes
            return max(flop / (peak * share) + drawing, nbytes / self.bandwidth)
        cycles = call.forward_cycles if forward else call.backward_cycles
        return flop / (peak * share) + self.core_s(cycles)

    def _norm_s(self, norm: ProductLoad, moved_bytes: float, *, forward: bool) -> float:
        """Seconds of a batch norm: cuDNN's, or torch's own in bf16, which in a forward reads and
        writes in another kernel. Both sum by channels; where nobody counted kernels, cuDNN's take
        an average for each element."""
        moving = moved_bytes / self.elementwise
        if self.device.kind == "cpu":
            return moving
        if not self.has_own_norms and self.vectors is None:
            slots = NORM_PASSES * norm.m * norm.n * self.calibration.norm_slots
            return max(slots / issue_per_s(self.device), moving)
        if not self.has_own_norms:
            summing = block_s(self.device, norm, cycles=CUDNN_CYCLES, forward=forward)
            return max(summing, moving)
        cycles = self.calibration.norm_cycles
        summing = block_s(self.device, norm, cycles=cycles, forward=forward)
        return summing + moving if forward else max(summing, moving)

    def _convolution_s(
        self, product: ProductLoad, flop: float, moved_bytes: float, *, forward: bool
    ) -> float:
        """Seconds of a convolution: all groups are one kernel; groups narrower than a tile leave
        the rest of it idle."""
        if product.n == 1 < product.repeats:
            # Depthwise: a memory-bound kernel without matrix units.
            reached = self.vector_peak * self.calibration.depthwise
            return max(flop / reached, moved_bytes / self.bandwidth)
        one = 2 * product.m * product.n * product.k * product.repeats
        best = self._best_share(is_convolution=True)
        share = size_efficiency(one, self.peak) * column_share(product.n) * best
        if self.peak > self.vector_peak:
            share *= self.calibration.convolution * self._backward_share(forward=forward)
        elif product.fewest < 1:
            # Fewer multiplications, but maps and weights are transformed before and after.
            share *= max(1.0, self.calibration.winograd / product.fewest)
        return max(flop / (self.peak * share), moved_bytes / self.bandwidth)

    def _backward_share(self, *, forward: bool) -> float:
        """Rate of a convolution over that of its forward, where kernels were counted."""
        is_rounded = self.has_units and self.operand_bytes == WIDE_BYTES
        is_rounded = is_rounded and self.vectors is not None
        return BACKWARD_IN_TF32 if is_rounded and not forward else 1.0

    @property
    def has_units(self) -> bool:
        """True if products with weights are by matrix units."""
        return self.device.kind != "cpu" and self.peak > self.vector_peak

    @property
    def vector_peak(self) -> float:
        return self.device.flop_per_s["float32"].value

    def _best_share(self, *, is_convolution: bool = False) -> float:
        """Share of the peak that large products reach: calibrated on matrix units, else limited by
        the instructions besides multiplications."""
        if self.device.kind == "cpu" or self.peak > self.vector_peak:
            return matmul_fraction(self.device, self.calibration)
        return self.calibration.vector_share(self.device, is_convolution=is_convolution)


def _written(product: ProductLoad, flop: float) -> float:
    """Bytes of the results: of a forward its output, of a backward both factors' gradients; those
    of weights are few."""
    m, n, k = product.m, product.n, product.k
    results = m * n if flop == product.forward_flop else m * k + n * k
    return ELEMENT_BYTES * results * product.repeats


# Rate of a convolution's backward in TF32 over that of its forward: cuDNN 9 has slower kernels for
# the gradient of the weight there than in 16 bits (1.9 times as slow for a ResNet-18 and a denoiser
# on an H200, by their kernels; single ones of 64 to 512 channels 1.6 to 1.8).
BACKWARD_IN_TF32 = 0.55
# Of an element by a training norm: three forward (twice the input, the result), five backward.
NORM_PASSES = (3 + 5) / 2
_WIDE = ("float32", "tfloat32")
WIDE_BYTES = 4
