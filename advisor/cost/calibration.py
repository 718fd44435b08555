"""Calibration: all constants of time and memory that no data sheet gives.

Few and physical. Each has a prior with its source, written down before any fit; the scorecard fits
them through `advisor.cost.estimate` (`make scorecard`).
"""

from __future__ import annotations

from math import gcd, hypot

from pydantic import NonNegativeFloat, PositiveFloat

from profiles.machine.catalogue import multiprocessors
from profiles.machine.cluster import ClusterProfile, Collective, Device
from profiles.model.work import AttentionKernel, ProductKind
from profiles.provenance import BENCH, Source
from profiles.record import Record

# Watts of board power per TFLOP/s of 16-bit peak below which a board is bound by its power in long
# products: A100 SXM 400 W for 312 (1.28) sustains what short benchmarks reach, H100 SXM 700 W for
# 989 (0.71) and T4 70 W for 65 (1.08) do not.
POWER_BOUND_W_PER_TFLOP_PER_S = 1.2
# 16-bit tensor-core kernels are at their best with sizes in multiples of 64 elements (NVIDIA,
# Matrix Multiplication Background User's Guide, table 1).
ALIGNMENT = 64
# Rows of operands that do not begin at multiples of so many bytes are loaded piece by piece (the
# same guide, table 1).
ROW_BYTES = 16
# Rows of one expert fill whole tiles of a grouped product.
TILE_ROWS = 128
# The third generation of flash attention is bound by exponentials where heads are narrow: one takes
# as long as the products of a head of 48 (16 of them a clock and multiprocessor, arXiv:2407.08608,
# section 3; on an H200 heads of 64 reach 0.78 of the rate of those of 128, by `make gpu`).
EXPONENTIAL, USUAL_WIDTH = 48.0, 128
# Instructions of one multiprocessor, where their number is not known: 128 lanes at 1.7 GHz.
ISSUE_OF_ONE = 128 * 1.7e9
# Columns of the narrowest tile in which cuDNN computes a convolution: thinner groups of channels
# leave the rest idle.
TILE_COLUMNS = 64
# Devices whose multiprocessors issue two instructions for each that their fp32 units take: 64 units
# and four schedulers of 32 lanes, so that loads and address arithmetic run in parallel with
# multiplications. Others have 128 units, or two schedulers (CUDA C++ Programming Guide, throughput
# of native arithmetic instructions: 64 results a clock at compute capability 7.0, 7.5, 8.0; 128 at
# 6.1, 8.6, 8.9, 9.0).
_TWO_ISSUES = ("V100", "T4", "TITAN", "RTX-20", "Quadro-RTX", "A100", "A800", "A30")


class Calibration(Record):
    """Constants that data sheets do not give.

    Attributes:
        sustained: share of the published best matmul rate that products sustain in a step, between
            other kernels and with sizes that were not tuned.
        power_bound: the same for boards that reach their power limit.
        memory: share of the achievable memory bandwidth that elementwise kernels reach.
        elementwise: bytes/s that a multiprocessor handles in torch's own elementwise kernels: with
            memories of 3.0 and 4.3 TB/s the same 132 of them reach 2.1 and 2.5 in steps (an H100
            and an H200, `make gpu`).
        unaligned: rate of products whose sizes are no multiples of 64, as a share of others'.
        odd: FLOP of products whose rows begin at odd addresses for each instruction that the device
            can issue, which their loads take, an element at a time: 98 and 117 TFLOP/s on an H200
            for a vocabulary of 50,257 (`make gpu`), a fifth of what 50,304 reaches; two at a time
            for one of 30,522 (BERT's products in steps).
        between: rate of products between other kernels of a step over that of products in a row,
            on boards that are bound by their power: with 1.1 products of five of six models' steps
            on an H100 are within 6 % (`make gpu`, kernels of a step); between two additions each
            the same products reach 1.02 to 1.06 on an H200 (layers between other kernels).
        grouped: rate of grouped products of experts, as a share of others'.
        convolution: rate of convolutions on matrix units, as a share of large products'. Prior 0.8:
            0.61 of the printed peak, what the model before this one was fitted to, over 0.76.
        vector: share of the fp32 peak that products on plain units reach at best. Prior 0.9:
            cuBLAS on devices before matrix units.
        vector_slots: instructions that a convolution issues there per fused multiply-add, including
            loads and address arithmetic. Prior 1.5.
        matmul_slots: the same of a matrix product: 51 of 67 TFLOP/s on an H200 (`make gpu`).
        winograd: rate of Winograd convolutions, as a share of what their fewer multiplications
            allow. Prior 0.65: the rest is for transforms.
        norm_slots: instructions for each element that cuDNN's training norms of images read or
            write. Prior 57: measured on an A100 in 16 bits, beyond its bandwidth.
        norm_cycles: of a block of threads for an element of its channel that a batch norm sums.
            Prior 2: torch's own kernels, which bf16 takes, on an H200 (`make gpu`).
        depthwise: share of the fp32 peak that convolutions with a group for each channel reach.
            Prior 0.13: an H200's kernels in 16 bits, 11 TFLOP/s forward, 8 backward.
        flash1, flash2, flash3: of attention, as a share of the 16-bit peak. FlashAttention reaches
            25 to 40 % of an A100 (arXiv:2205.14135), the second 50 to 73 % (2307.08691), the third
            up to 75 % of an H100 (2407.08608); a backward less than a forward.
        flash2_on_hopper: 35 % (arXiv:2407.08608, section 1): instructions of the generation before.
        collectives: rate of collectives inside a step, as a share of their best.
        pcie: the same inside a node without NVLink, where devices share the bus.
        shared_cards: the same between nodes whose devices share network cards.
        launch: host time of a launch inside a step, over the cluster profile's.
        context_bytes: of a process, in addition to the cluster profile's.
        slack: bytes that the allocator reserves in addition to allocated ones, as a share of them.
    """

    sustained: PositiveFloat = 0.875
    power_bound: PositiveFloat = 0.735
    memory: PositiveFloat = 0.827
    elementwise: PositiveFloat = 22.7e9
    unaligned: PositiveFloat = 0.671
    odd: PositiveFloat = 3.3
    between: PositiveFloat = 1.1
    grouped: PositiveFloat = 0.721
    convolution: PositiveFloat = 0.817
    vector: PositiveFloat = 0.707
    vector_slots: PositiveFloat = 1.54
    matmul_slots: PositiveFloat = 1.32
    winograd: PositiveFloat = 0.685
    norm_slots: PositiveFloat = 57.9
    norm_cycles: PositiveFloat = 2.0
    depthwise: PositiveFloat = 0.13
    flash1: PositiveFloat = 0.308
    flash2: PositiveFloat = 0.563
    flash2_on_hopper: PositiveFloat = 0.341
    flash3: PositiveFloat = 0.544
    collectives: PositiveFloat = 0.913
    pcie: PositiveFloat = 0.674
    shared_cards: PositiveFloat = 0.544
    launch: PositiveFloat = 1.0
    context_bytes: NonNegativeFloat = 0.0
    slack: NonNegativeFloat = 0.179

    def bandwidth_bytes_per_s(self, device: Device) -> float:
        """Bandwidth of elementwise kernels in a step; a measured rate is used as is."""
        rate = device.memory_bandwidth_bytes_per_s
        if device.kind == "cpu" or rate.source is Source.MEASURED:
            return rate.value
        return rate.value * self.memory

    def elementwise_bytes_per_s(self, device: Device, *, is_eager: bool) -> float:
        """The same of torch's own kernels, `is_eager`: multiprocessors handle few bytes at a time,
        which overlaps with the memory's own time in part."""
        rate = self.bandwidth_bytes_per_s(device)
        if device.kind == "cpu" or not is_eager:
            return rate
        count = multiprocessors(device.name) or issue_per_s(device) / ISSUE_OF_ONE
        return 1 / hypot(1 / rate, 1 / (count * self.elementwise * device.elementwise))

    def collective_share(
        self, cluster: ClusterProfile, kind: Collective, group_size: int, stride: int
    ) -> float:
        """Rate of a group's collectives in a step over that of the links alone; 1 for measured
        links."""
        if group_size < 2 or cluster.device.kind == "cpu":
            return 1.0
        crosses = cluster.crosses_nodes(group_size, stride)
        link = cluster.inter if crosses else cluster.intra
        if link is None or link.fits or link.bandwidth_bytes_per_s.source is Source.MEASURED:
            return 1.0
        if not crosses and link.name.startswith("PCIe"):
            # A single transfer between two devices has no contention.
            return 1.0 if kind is Collective.SEND_RECV else self.pcie
        cards = cluster.network_cards or cluster.devices_per_node
        return (
            self.shared_cards
            if crosses and cards < cluster.devices_per_node
            else (self.collectives)
        )

    def matmul_share(self, device: Device) -> float:
        """Share of the peak that large products reach inside a step. A share measured on the
        machine is used as is where steps were; a bench multiplies in a row."""
        fraction = device.matmul_fraction
        if fraction.source is Source.MEASURED or device.kind == "cpu":
            in_a_row = fraction.origin == BENCH and is_power_bound(device)
            return fraction.value * (self.between if in_a_row else 1.0)
        return fraction.value * (self.power_bound if is_power_bound(device) else self.sustained)

    def vector_share(self, device: Device, *, is_convolution: bool = False) -> float:
        """Share of the fp32 peak that products without matrix units reach."""
        issues = 2 if device.name.startswith(_TWO_ISSUES) else 1
        slots = self.vector_slots if is_convolution else self.matmul_slots
        return min(self.vector, issues / slots)

    def attention_share(
        self, device: Device, kernel: AttentionKernel, *, width: int = USUAL_WIDTH
    ) -> float:
        """Share of the 16-bit peak that fused attention reaches with heads of `width`."""
        later = device.is_hopper_or_later
        share = self.flash2_on_hopper if later else self.flash2
        if kernel is AttentionKernel.FLASH1:
            share = self.flash1 * (self.flash2_on_hopper / self.flash2 if later else 1.0)
        elif kernel is AttentionKernel.FLASH3 and later:
            usual, own = 1 + EXPONENTIAL / USUAL_WIDTH, 1 + EXPONENTIAL / width
            share = self.flash3 * usual / own
        return share * device.attention

    def product_share(self, n: float, k: float, kind: ProductKind, device: Device) -> float:
        """Rate of a product of these sizes over that of large, aligned ones."""
        if device.kind == "cpu":
            return 1.0
        if kind is ProductKind.GROUPED:
            return self.grouped
        return 1.0 if n % ALIGNMENT == 0 and k % ALIGNMENT == 0 else self.unaligned


def is_power_bound(device: Device) -> bool:
    """Return True if long products are limited by the board's power, not its clock."""
    power, peak = device.board_power_w, device.flop_per_s.get("bfloat16")
    peak = peak or device.flop_per_s.get("float16")
    if power is None or peak is None:
        return False
    return power.value / (peak.value / 1e12) < POWER_BOUND_W_PER_TFLOP_PER_S


def tile_share(product_rows: float, kind: ProductKind) -> float:
    """Share of tile area that the rows of one expert fill."""
    if kind is not ProductKind.GROUPED or product_rows <= 0:
        return 1.0
    tiles = -(-product_rows // TILE_ROWS)
    return product_rows / (tiles * TILE_ROWS)


def elements_a_load(n: float, k: float, element_bytes: int) -> int:
    """Elements that a product's rows, of operands and result, allow a load to take at once."""
    return gcd(int(n), int(k), ROW_BYTES // element_bytes)


def column_share(columns: float) -> float:
    """Share of tile area that a convolution's columns fill."""
    tiles = -(-columns // TILE_COLUMNS)
    return columns / (tiles * TILE_COLUMNS)


def issue_per_s(device: Device) -> float:
    """Instructions per second over all lanes of a device; two FLOP are one."""
    issues = 2 if device.name.startswith(_TWO_ISSUES) else 1
    return issues * device.flop_per_s["float32"].value / 2


CALIBRATION = Calibration()
