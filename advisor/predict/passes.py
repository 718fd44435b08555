"""Passes: the seconds of a layer forward, backward and again, at the best rates there are.

Sums over layers stay sums: each field is divided later by what a step reaches of its best rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from advisor.cost.collective import collective_s
from advisor.cost.compute import peak_flop_per_s
from advisor.predict.generations import attention_share, narrow_share
from advisor.predict.setup import Setup
from advisor.predict.work import NARROW, LayerWork
from profiles.cluster import ClusterProfile, Collective

# A product of activations with odd rows over one without (A100: 16-byte loads of 8 elements in one
# against 2 to 4 byte ones).
ODD = 4
# Results of a product are computed in tiles; rows of an expert fill whole ones.
TILE = 128
# Dispatchers of this date on (DeepEP, HybridEP) send a token once to each node and, in it, once to
# each rank; not once to each expert.
ONCE = 2025.0


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one pass over some layers at the best rates, to be divided by what is reached."""

    plain_s: float = 0.0
    unaligned_s: float = 0.0
    expert_s: float = 0.0
    flash_s: float = 0.0
    memory_s: float = 0.0
    scan_s: float = 0.0
    kernels: float = 0.0
    tensor_s: float = 0.0
    tokens_s: float = 0.0
    context_s: float = 0.0

    def __add__(self, other: Pass) -> Pass:
        return Pass(*(a + b for a, b in zip(_values(self), _values(other), strict=True)))

    def __mul__(self, factor: float) -> Pass:
        return Pass(*(value * factor for value in _values(self)))


def forward_of(setup: Setup, layer: LayerWork) -> Pass:
    """A layer forward."""
    cluster, layout, device = setup.cluster, setup.layout, setup.cluster.device
    best = device.matmul_fraction.value
    narrow = setup.dtype in NARROW
    wide = "bfloat16" if narrow else setup.dtype
    peak = _peak(setup, wide) * best
    small = _narrow_peak(setup) * best * narrow_share(device.name) if narrow else peak
    own = setup.software.family in ("megatron", "torchtitan")
    attention = attention_share(device.name, own_kernels=own)
    bandwidth = device.memory_bandwidth_bytes_per_s.value
    width = 4 if wide in ("float32", "tfloat32") else 2
    plain = odd = expert = converted = streamed = 0.0
    for product in layer.products:
        seconds = product.flop / (small if narrow and product.linear else peak)
        if not product.linear:
            # Products of activations have little to reuse: their traffic decides. Rows that cannot
            # be read 16 bytes at once take the kernels without tensor cores.
            streamed += max(
                product.elements * width * (ODD if product.odd else 1), seconds * bandwidth
            )
            continue
        if product.expert and product.count > 1:
            # One expert on a rank is a product like any other.
            expert += seconds * ceil(product.m / TILE) * TILE / product.m
        elif not (product.aligned or narrow):
            odd += seconds
        else:
            plain += seconds
        if narrow and not (product.expert and setup.software.fused_experts):
            converted += product.m * product.k * product.count
            if product.expert:
                # Rows of each expert are padded to whole blocks of scales, and taken out again.
                converted += product.m * product.k * product.count
    tensor = tokens = context = 0.0
    if layer.tensor_exchanges:
        tensor = layer.tensor_exchanges * collective_s(
            cluster, Collective.ALL_REDUCE, layer.tensor_bytes, group_size=layout.tp
        )
    if layer.token_bytes:
        tokens = 2 * exchange_s(cluster, layer.token_bytes, setup)
    if layer.context_bytes:
        context = collective_s(
            cluster,
            Collective.ALL_GATHER,
            layer.context_bytes,
            group_size=layout.cp,
            stride=layout.tp,
        )
    return Pass(
        plain_s=plain,
        unaligned_s=odd,
        expert_s=expert,
        flash_s=layer.flash_flop / (peak * attention),
        # Reading 16 bits, writing 8 twice: as it is and transposed.
        memory_s=((layer.moved_bytes + layer.score_bytes) * width / 2 + 4 * converted + streamed)
        / bandwidth,
        scan_s=layer.scan / bandwidth,
        kernels=layer.kernels,
        tensor_s=tensor,
        tokens_s=tokens,
        context_s=context,
    )


def backward_of(setup: Setup, layer: LayerWork, forward: Pass) -> Pass:
    """Two products for one, and gradients of weights that are added to what is there."""
    bandwidth = setup.cluster.device.memory_bandwidth_bytes_per_s.value
    kept = setup.software.gradient_bytes
    if setup.software.family == "megatron":
        # The product adds to what it reads (fused accumulation): only what its arithmetic does not
        # hide of that traffic counts.
        added = max(0.0, 2 * kept * layer.parameters / bandwidth - forward.plain_s)
        added += max(0.0, 2 * kept * layer.expert_parameters / bandwidth - forward.expert_s)
    else:
        # A 16-bit gradient is read beside.
        weights = layer.parameters + layer.expert_parameters
        added = (2 * kept + 2) * weights / bandwidth
    twice = forward * 2
    again = 0.5 if setup.software.sequence_parallel else 0.0
    return Pass(
        plain_s=twice.plain_s,
        unaligned_s=twice.unaligned_s,
        expert_s=twice.expert_s,
        flash_s=2.5 * forward.flash_s,
        memory_s=twice.memory_s + added,
        scan_s=twice.scan_s,
        kernels=twice.kernels,
        # Inputs are gathered once more for the weights' gradients.
        tensor_s=forward.tensor_s * (1 + again),
        tokens_s=forward.tokens_s,
        context_s=2 * forward.context_s,
    )


def again_of(setup: Setup, layer: LayerWork, forward: Pass) -> Pass:
    """What recompute repeats."""
    recompute = setup.software.recompute
    if recompute == "full":
        return forward
    if recompute == "none":
        return Pass()
    if recompute == "selective-ops":
        # What lies between products and attention; torchtitan keeps every other product only
        # (activation_checkpoint.py, `mm_count % 2`).
        one = LayerWork(products=(), moved_bytes=layer.moved_bytes, kernels=layer.kernels / 2)
        half = 0.5 if setup.software.family == "torchtitan" else 0.0
        linear = tuple(product for product in layer.products if product.linear)
        return forward_of(setup, one) + forward_of(setup, LayerWork(products=linear)) * half
    core = LayerWork(
        products=tuple(product for product in layer.products if not product.linear),
        flash_flop=layer.flash_flop,
        score_bytes=layer.score_bytes,
        kernels=3,
    )
    return forward_of(setup, core)


def exchange_s(cluster: ClusterProfile, sent_bytes: float, setup: Setup) -> float:
    """Seconds in which each rank sends `sent_bytes`, split evenly over the experts' ranks.

    What stays inside a node goes over its links, what leaves it over the rank's part of the cards.
    """
    layout, shape = setup.layout, setup.shape
    size = layout.ep
    if size < 2 or shape is None:
        return 0.0
    inside = cluster.ranks_per_node(size)
    nodes = -(-size // inside)
    latency = cluster.link(size).latency_s.value
    seconds = latency * (inside - 1 if nodes == 1 else nodes)
    if inside > 1 and cluster.intra is not None:
        distinct = (size - 1) / size
        if setup.software.year >= ONCE:
            distinct *= size * (1 - (1 - 1 / size) ** shape.topk) / shape.topk
        seconds += sent_bytes * distinct / cluster.intra.bandwidth_bytes_per_s.value
    if nodes > 1:
        crossing = (nodes - 1) / nodes
        if setup.software.year >= ONCE:
            # Distinct other nodes among those of `topk` experts drawn evenly.
            copies = (nodes - 1) * (1 - (1 - 1 / nodes) ** shape.topk)
            crossing = min(crossing, copies / shape.topk)
        card = cluster.group_bandwidth(size).value / inside
        seconds = max(seconds, sent_bytes * crossing / card)
    return seconds


def _peak(setup: Setup, dtype: str) -> float:
    """Where 16 bits are slower than 32 (GeForce before 2018), libraries compute in 32."""
    device = setup.cluster.device
    return max(peak_flop_per_s(device, dtype).value, device.flop_per_s["float32"].value)


def _narrow_peak(setup: Setup) -> float:
    """fp8's peak; fp4 at twice that; bfloat16's where the device has neither."""
    rates = setup.cluster.device.flop_per_s
    if "float8_e4m3fn" not in rates:
        return _peak(setup, "bfloat16")
    return rates["float8_e4m3fn"].value * (2 if setup.dtype == "float4" else 1)


def _values(part: Pass) -> tuple[float, ...]:
    return tuple(getattr(part, name) for name in Pass.__slots__)
