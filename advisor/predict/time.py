"""Seconds of a step, taken apart.

A step is `accumulation` microbatches through the fullest stage, the bubble of filling and draining
the pipeline, what data-parallel traffic adds that computing does not hide, and the update:

    product    flop / (peak * best share * share in a step) + bytes that computing does not hide
    attention  flop at its own rate, or products and passes over scores where those are kept
    exchange   `advisor.cost.collective` over the rate that collectives reach inside a step
    host       a layer takes no less than launching its kernels

`basis_of` is all that does not depend on the fitted constants, so that a fit is quick.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from advisor.cost.collective import collective_s
from advisor.cost.compute import peak_flop_per_s
from advisor.predict.constants import CONSTANTS, Constants
from advisor.predict.setup import Setup
from advisor.predict.work import LayerWork, Product, work_of
from profiles.cluster import ClusterProfile, Collective

# Bytes an update moves per parameter it holds: Adam reads gradient, weight and two moments and
# writes three of them and the 16-bit weight (4 + 12 + 12 + 2), clipping and unscaling read and
# write gradients once more (8).
UPDATE_BYTES = 38
# DeepSpeed's pipeline waits for each tensor that it passes on, so that the host launches the first
# layer's kernels anew, forward and backward.
WAITS = 40
# Launched once a step: norms, clipping and update over lists of tensors, loss and counters fetched.
STEP_KERNELS = 300
# CPU memory of a node that its devices' optimizers share: as `advisor.cost.compute`.
# A product of activations with odd rows over one without (A100: 16-byte loads of 8 elements in one
# against 2 to 4 byte ones).
ODD = 4
# Results of a product are computed in tiles of about 128 x 256, one on each multiprocessor at a
# time: 108 of them on an A100, 132 on an H100, 148 on a B200. The last round is rarely full: what a
# round could have held counts in part (`Constants.tail`). Rows of an expert fill whole tiles.
TILE, WAVE = 128, 128 * 256 * 120
HOST_BANDWIDTH_BYTES_PER_S = 100e9
# Generations by the start of a device's name; parts of none are taken as `ampere`.
_GENERATIONS = (
    ("V100", "volta"),
    ("P100", "volta"),
    ("P40", "volta"),
    ("GTX", "volta"),
    ("T4", "turing"),
    ("Quadro", "turing"),
    ("TITAN", "turing"),
    ("RTX-20", "turing"),
    ("H100", "hopper"),
    ("H200", "hopper"),
    ("H800", "hopper"),
    ("H20", "hopper"),
    ("GH200", "hopper"),
    ("B200", "blackwell"),
    ("B300", "blackwell"),
    ("GB", "blackwell"),
)


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one pass over some layers at the best rates, to be divided by what is reached."""

    plain_s: float = 0.0
    unaligned_s: float = 0.0
    narrow_s: float = 0.0
    expert_s: float = 0.0
    expert_narrow_s: float = 0.0
    flash_s: float = 0.0
    tail_s: float = 0.0
    back_tail_s: float = 0.0
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


@dataclass(frozen=True, slots=True)
class Basis:
    """A step before the fitted constants."""

    generation: str
    forward: Pass
    backward: Pass
    again: Pass
    head: Pass
    slowest: float
    last: float
    stages: int
    virtual: int
    accumulation: int
    boundary_s: float
    tensor_rate: str
    data_rate: str
    boundary_rate: str
    reduce_s: float
    gather_s: float
    once_s: float
    zero: int
    update_s: float
    overlap_reduce: bool
    overlap_gather: bool
    overlap_tensor: bool
    overlap_boundary: bool
    older_kernels: bool
    waits: int
    once: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step by what they go into; they add up to `step_s`."""

    compute_s: float
    recompute_s: float
    tensor_s: float
    experts_s: float
    bubble_s: float
    data_s: float
    update_s: float
    host_s: float

    @property
    def step_s(self) -> float:
        busy = self.compute_s + self.recompute_s + self.tensor_s + self.experts_s
        return busy + self.bubble_s + self.data_s + self.update_s + self.host_s


def time_of(setup: Setup, constants: Constants = CONSTANTS) -> StepTime:
    """Seconds of a transformer's step."""
    return step_time(basis_of(setup), constants)


def step_time(basis: Basis, constants: Constants) -> StepTime:
    """A step from its basis: the formulas of this module."""
    layers = _parts(basis.forward + basis.backward, basis, constants)
    again = _parts(basis.again, basis, constants)
    head = _parts(basis.head, basis, constants)
    whole = sum(layers) + sum(again) + sum(head)
    fullest = (sum(layers) + sum(again)) * basis.slowest
    bottleneck = max(fullest, (sum(layers) + sum(again)) * basis.last + sum(head))
    if basis.stages == 1:
        bottleneck = whole
    m = basis.accumulation
    share = m * bottleneck / whole
    bubble = (whole - bottleneck) / basis.virtual
    boundary = basis.boundary_s / _of(constants, basis.boundary_rate)
    visible = 1 - constants.tensor_overlap if basis.overlap_boundary else 1.0
    bubble += (2 * m * basis.virtual * visible + 2 * (basis.stages - 1)) * boundary
    bubble += 2 * m * basis.waits * constants.launch_s
    data = _data_s(basis, constants, whole / basis.stages)
    return StepTime(
        compute_s=(layers[0] + head[0]) * share,
        recompute_s=again[0] * share,
        tensor_s=(layers[1] + again[1] + head[1]) * share,
        experts_s=(layers[2] + again[2]) * share,
        bubble_s=bubble,
        data_s=data,
        update_s=basis.update_s,
        host_s=(layers[3] + again[3] + head[3]) * share + basis.once * constants.launch_s,
    )


def _parts(part: Pass, basis: Basis, c: Constants) -> tuple[float, float, float, float]:
    """Seconds of computing, tensor and context exchange, tokens, and waiting for the host."""
    share = _of(c, basis.generation)
    compute = (part.plain_s + part.unaligned_s / c.unaligned + part.narrow_s / c.narrow) / share
    compute += (part.expert_s + part.expert_narrow_s / c.narrow) / (share * c.expert)
    older = c.older_kernels if basis.older_kernels else 1.0
    compute += part.flash_s / (share * c.flash * older)
    compute += (
        part.tail_s * c.tail / share + (part.memory_s + part.scan_s * c.scan_bytes) / c.memory
    )
    hidden = c.tensor_overlap if basis.overlap_tensor else 0.0
    tensor = part.tensor_s * (1 - hidden) / _of(c, basis.tensor_rate)
    tensor += part.context_s * (1 - c.tensor_overlap) / c.inside
    tokens = part.tokens_s
    launch = part.kernels * c.launch_s
    if basis.generation in ("volta", "turing", "ampere"):
        launch *= c.older_host
    return compute, tensor, tokens, max(0.0, launch - compute - tensor - tokens)


def _data_s(basis: Basis, c: Constants, microbatch_s: float) -> float:
    """What the exchange of gradients and weights adds to a step."""
    rate = _of(c, basis.data_rate)
    reduce, gather = basis.reduce_s / rate, basis.gather_s / rate
    if basis.zero == 3:
        # Weights come twice and gradients leave once in each microbatch, beside the computing.
        traffic = 2 * gather + reduce
        hidden = min(c.data_overlap * traffic, microbatch_s) if basis.overlap_gather else 0.0
        return (traffic - hidden) * basis.accumulation + basis.once_s / rate
    if basis.overlap_reduce:
        reduce -= min(c.data_overlap * reduce, microbatch_s * 2 / 3)
    if basis.overlap_gather:
        gather -= min(c.data_overlap * gather, microbatch_s / 3)
    return reduce + gather + basis.once_s / rate


def basis_of(setup: Setup) -> Basis:
    """All of a step that does not depend on fitted constants."""
    work, layout, software = work_of(setup), setup.layout, setup.software
    cluster = setup.cluster
    forward = backward = again = Pass()
    for layer, count in work.layers:
        one = _pass(setup, layer)
        forward += one * count
        back = _backward(setup, layer, one, work.setup)
        backward += back * count
        again += _again(setup, layer, one) * count
    head = _pass(setup, work.head)
    head += _backward(setup, work.head, head, setup)
    ranks = layout.dp * layout.cp
    stride = layout.tp
    shard = min(layout.shard, ranks)
    own = work.parameters
    expert_ranks = max(1, ranks * layout.tp // layout.ep)
    reduce = gather = once = 0.0
    zero = layout.zero
    kinds = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
    for parameters, size, step in (
        (own, ranks, stride),
        (work.expert_parameters, expert_ranks, layout.ep),
    ):
        if size < 2 or not parameters:
            continue
        whole = size
        size = min(size, shard) if zero == 3 else size
        sent = parameters * software.reduce_bytes
        pieces = _pieces(setup, parameters, size)
        at = {"group_size": size, "stride": step}
        if zero == 0 or (zero == 1 and software.family == "megatron-deepspeed"):
            # DeepSpeed's pipeline reduces whole gradients also where it splits optimizer states.
            reduce += collective_s(cluster, Collective.ALL_REDUCE, sent, **at)
        else:
            reduce += pieces * collective_s(cluster, kinds[0], sent / pieces, **at)
        if zero == 0:
            continue
        weights = parameters * min(software.weight_bytes, 2.0)
        if software.family == "internevo":
            # Each owner broadcasts its part to its shard group, along a chain of the nodes.
            at["group_size"] = owners = min(size, shard)
            chain = owners // cluster.ranks_per_node(owners, step)
            between = cluster.inter.latency_s.value if cluster.inter is not None else 0.0
            gather += owners * (chain - 1) * between
        gather += pieces * collective_s(cluster, kinds[1], weights / pieces, **at)
        if zero == 3 and size < whole:
            # What each shard group has reduced is reduced between the groups (HSDP).
            once += collective_s(
                cluster,
                Collective.ALL_REDUCE,
                sent / size,
                group_size=whole // size,
                stride=step * size,
            )
    if layout.pp > 1 and setup.shape is not None and setup.shape.tied:
        ends = setup.shape.vocab * setup.shape.hidden / layout.tp * software.reduce_bytes
        apart = layout.world // layout.pp
        once += collective_s(cluster, Collective.ALL_REDUCE, ends, group_size=2, stride=apart)
    boundary = 0.0
    if layout.pp > 1:
        boundary = collective_s(
            cluster,
            Collective.SEND_RECV,
            work.boundary_bytes,
            group_size=2,
            stride=layout.world // layout.pp,
        )
    return Basis(
        generation=_generation(cluster.device.name),
        forward=forward,
        backward=backward,
        again=again,
        head=head,
        slowest=work.slowest,
        last=work.last,
        stages=layout.pp,
        virtual=layout.virtual,
        accumulation=layout.accumulation,
        boundary_s=boundary,
        tensor_rate=_rate(cluster, layout.tp, 1),
        data_rate=_rate(cluster, ranks, stride),
        boundary_rate=_rate(cluster, layout.pp, layout.world // layout.pp),
        reduce_s=reduce,
        gather_s=gather,
        once_s=once,
        zero=zero,
        update_s=_update_s(setup, own, work.expert_parameters, ranks, expert_ranks),
        overlap_reduce=software.overlap_reduce,
        overlap_gather=software.overlap_gather,
        overlap_tensor=software.overlap_tensor,
        overlap_boundary=software.overlap_tensor,
        once=STEP_KERNELS if setup.shape is not None and setup.shape.vocab else 0,
        waits=WAITS if layout.pp > 1 and "deepspeed" in software.family else 0,
        older_kernels=_generation(cluster.device.name) in ("hopper", "blackwell")
        and software.family not in ("megatron", "torchtitan"),
    )


def _pieces(setup: Setup, parameters: float, ranks: int) -> int:
    """Collectives in which gradients or weights travel.

    FSDP sends a block at a time; DeepSpeed's ZeRO-3 of 2021 each tensor by itself, about a dozen a
    layer; the others buckets so large that their latency does not count.
    """
    shape, software = setup.shape, setup.software
    if setup.layout.zero != 3 or shape is None:
        return 1
    single = software.family in ("megatron", "deepspeed", "megatron-deepspeed")
    return shape.layers * (12 if single and software.year < 2022 else 1)


def _pass(setup: Setup, layer: LayerWork) -> Pass:
    """A layer forward."""
    cluster, layout, device = setup.cluster, setup.layout, setup.cluster.device
    best = device.matmul_fraction.value
    wide = "float32" if setup.dtype == "float32" else setup.dtype
    narrow = setup.dtype in ("float8_e4m3fn", "float4")
    if narrow:
        wide = "bfloat16"
    peak = _peak(setup, wide) * best
    small = _narrow_peak(setup) * best if narrow else peak
    bandwidth = device.memory_bandwidth_bytes_per_s.value
    width = 4 if wide in ("float32", "tfloat32") else 2
    plain = odd = low = expert = expert_low = tail = back_tail = converted = streamed = 0.0
    for product in layer.products:
        seconds = product.flop / (small if narrow and product.linear else peak)
        if not product.linear:
            # Products of activations have little to reuse: their traffic decides. Rows that cannot
            # be read 16 bytes at once take the kernels without tensor cores.
            streamed += max(
                product.elements * width * (ODD if product.odd else 1), seconds * bandwidth
            )
            continue
        rate = (small if narrow else peak) * (1 if product.aligned else 0.5)
        tail += 2 * product.k * WAVE / rate
        back_tail += 2 * (product.n + product.m) * WAVE / rate
        if product.expert:
            seconds *= ceil(product.m / TILE) * TILE / product.m
            expert, expert_low = (
                (expert, expert_low + seconds) if narrow else (expert + seconds, expert_low)
            )
        elif narrow and product.linear:
            low += seconds
        elif not product.aligned:
            odd += seconds
        else:
            plain += seconds
        if narrow and product.linear:
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
        narrow_s=low,
        expert_s=expert,
        expert_narrow_s=expert_low,
        flash_s=layer.flash_flop / peak,
        tail_s=tail,
        back_tail_s=back_tail,
        # Reading 16 bits, writing 8 twice: as it is and transposed.
        memory_s=((layer.moved_bytes + layer.score_bytes) * width / 2 + 4 * converted + streamed)
        / bandwidth,
        scan_s=layer.scan / bandwidth,
        kernels=layer.kernels,
        tensor_s=tensor,
        tokens_s=tokens,
        context_s=context,
    )


def _backward(setup: Setup, layer: LayerWork, forward: Pass, _: Setup) -> Pass:
    """Two products for one, and gradients of weights that are added to what is there."""
    bandwidth = setup.cluster.device.memory_bandwidth_bytes_per_s.value
    weights = layer.parameters + layer.expert_parameters
    # Read and written once more by the product itself (Megatron's fused accumulation), else a
    # 16-bit gradient is read beside.
    fused = setup.software.family == "megatron"
    added = (2 * setup.software.gradient_bytes + (0 if fused else 2)) * weights / bandwidth
    twice = forward * 2
    again = 0.5 if setup.software.sequence_parallel else 0.0
    return Pass(
        plain_s=twice.plain_s,
        unaligned_s=twice.unaligned_s,
        narrow_s=twice.narrow_s,
        expert_s=twice.expert_s,
        expert_narrow_s=twice.expert_narrow_s,
        flash_s=2.5 * forward.flash_s,
        tail_s=forward.back_tail_s,
        memory_s=twice.memory_s + added,
        scan_s=twice.scan_s,
        kernels=twice.kernels,
        # Inputs are gathered once more for the weights' gradients.
        tensor_s=forward.tensor_s * (1 + again),
        tokens_s=forward.tokens_s,
        context_s=2 * forward.context_s,
    )


def _again(setup: Setup, layer: LayerWork, forward: Pass) -> Pass:
    """What recompute repeats."""
    recompute = setup.software.recompute
    if recompute == "full":
        return forward
    if recompute == "none":
        return Pass()
    core = [product for product in layer.products if not product.linear]
    scores = LayerWork(
        products=tuple(core), flash_flop=layer.flash_flop, score_bytes=layer.score_bytes, kernels=3
    )
    one = _pass(setup, scores)
    if recompute == "selective-ops":
        moved = LayerWork(products=(), moved_bytes=layer.moved_bytes, kernels=layer.kernels / 2)
        one += _pass(setup, moved)
    return one


def exchange_s(cluster: ClusterProfile, sent_bytes: float, setup: Setup) -> float:
    """Seconds in which each rank sends `sent_bytes`, split evenly over the experts' ranks.

    What stays inside a node goes over its links, what leaves it over the rank's part of the cards.
    Dispatchers since 2025 (DeepEP) send a token once to each node, not once to each expert.
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
        seconds += sent_bytes * (size - 1) / size / cluster.intra.bandwidth_bytes_per_s.value
    if nodes > 1:
        crossing = (nodes - 1) / nodes
        if setup.software.year >= 2025:
            # Distinct other nodes among those of `topk` experts drawn evenly.
            copies = (nodes - 1) * (1 - (1 - 1 / nodes) ** shape.topk)
            crossing = min(crossing, copies / shape.topk)
        card = cluster.group_bandwidth(size).value / inside
        seconds = max(seconds, sent_bytes * crossing / card)
    return seconds


def _update_s(
    setup: Setup, parameters: float, expert_parameters: float, ranks: int, expert_ranks: int
) -> float:
    layout = setup.layout
    held = parameters + expert_parameters
    if setup.shape is not None and not setup.shape.vocab:
        return 0.0  # a layer by itself
    if layout.zero:
        shard = min(layout.shard, ranks) if layout.zero == 3 else ranks
        held = parameters / max(1, shard) + expert_parameters / expert_ranks
    if setup.software.offload.startswith("optimizer"):
        per_rank = HOST_BANDWIDTH_BYTES_PER_S / setup.cluster.devices_per_node
        return held * UPDATE_BYTES / per_rank
    return held * UPDATE_BYTES / setup.cluster.device.memory_bandwidth_bytes_per_s.value


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


def _of(constants: Constants, name: str) -> float:
    return float(getattr(constants, name))


def _rate(cluster: ClusterProfile, size: int, stride: int) -> str:
    """Which constant says what a group's collectives reach of their best."""
    if not cluster.crosses_nodes(size, stride):
        return "inside"
    cards = cluster.network_cards or cluster.devices_per_node
    return "shared" if cards < cluster.devices_per_node else "rails"


def _generation(name: str) -> str:
    return next((kind for start, kind in _GENERATIONS if name.startswith(start)), "ampere")


def _values(part: Pass) -> tuple[float, ...]:
    return tuple(getattr(part, name) for name in Pass.__slots__)


__all__ = ["Basis", "Pass", "Product", "StepTime", "basis_of", "step_time", "time_of"]
