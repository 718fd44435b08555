"""Work: what one device does in a step of a setup, counted; nothing here is fitted.

A *layer* lists its matrix products with the sizes that a rank sees after tensor, context and expert
parallelism, the attention, the bytes that elementwise kernels move, and what is exchanged. Backward
is twice the products and elementwise bytes, and 2.5 times a flash attention (it computes scores
again: five products for two).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil

from advisor.predict.architectures import parameters_of
from advisor.predict.setup import Setup, Shape

# Width of a score chunk and of the state in state-space layers (Mamba-2: chunk_size, ssm_state).
CHUNK, STATE = 128, 128
ALIGNMENT = 64
# Traffic of elementwise operations one by one over that of fused kernels: bias, activation, dropout
# and residual are four reads and writes for two; norms are one kernel in both.
EAGER = 1.5
# Launched in place of one product each for queries, keys and values: products down to latents and
# up, their two norms, and what splits, turns and joins the rotary parts. Calibrated on runs that
# wait for their hosts (latent attention among Megatron's functional tests, Moonlight on 8 H100).
LATENT_KERNELS = 35
# Launched for a layer's experts: router, permutations, exchange, grouped products; and for weighing
# and adding up what several experts make of a token, with the balance of their loads. Calibrated on
# Megatron's functional tests with one expert a token, and with two.
ROUTED, WEIGHED = 30, 20
# Kernels of a layer with experts that its CUDA graphs leave out: dispatch, products, return.
OUTSIDE_GRAPHS = 18
NARROW = frozenset({"float8_e4m3fn", "float4"})
# Latents of multi-head latent attention: queries, keys and values, and the rotary part of a head
# (DeepSeek-V3, config.json).
QUERY_LATENT, KEY_LATENT, ROTARY = 1536, 512, 64


@dataclass(frozen=True, slots=True)
class Product:
    """`count` products of m x k by k x n; `linear`: with weights, so in the recipe's dtype."""

    m: float
    n: float
    k: float
    count: float = 1
    linear: bool = True
    expert: bool = False

    @property
    def flop(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.count

    @property
    def odd(self) -> bool:
        """Whether a product of activations has rows that are no multiple of 16 bytes."""
        return not self.linear and bool(self.k % 8 or self.n % 8)

    @property
    def aligned(self) -> bool:
        """Whether rows of the weight and of the output are whole lines of 128 bytes.

        16-bit tensor-core kernels are at their best with sizes in multiples of 64 (NVIDIA, Matrix
        Multiplication Background User's Guide, table 1: A100).
        """
        return not self.linear or (self.n % ALIGNMENT == 0 and self.k % ALIGNMENT == 0)

    @property
    def elements(self) -> float:
        return (self.m * self.k + self.k * self.n + self.m * self.n) * self.count


@dataclass(frozen=True, slots=True)
class LayerWork:
    """One layer, one microbatch, forward.

    Attributes:
        flash_flop: of an attention that keeps no scores.
        moved_bytes, score_bytes: by elementwise kernels, where an element has 2 bytes.
        scan: elements that a state-space layer carries its state through.
        kernels: launched.
        tensor_bytes: payload of each of `tensor_exchanges` all-reduces of the tensor ranks, or
            of an all-gather and a reduce-scatter in place of each.
        token_bytes: sent to experts, and back, by a rank.
        context_bytes: keys and values that pass between the context ranks.
        parameters, expert_parameters: held by a rank.
    """

    products: tuple[Product, ...]
    flash_flop: float = 0.0
    moved_bytes: float = 0.0
    score_bytes: float = 0.0
    kernels: float = 0.0
    tensor_bytes: float = 0.0
    tensor_exchanges: int = 0
    scan: float = 0.0
    token_bytes: float = 0.0
    context_bytes: float = 0.0
    parameters: float = 0.0
    expert_parameters: float = 0.0


@dataclass(frozen=True, slots=True)
class Work:
    """A step: layers by kind with how many of each there are in all, and what a model has once.

    Attributes:
        layers: with their number over all stages.
        slowest: the share of all layers that the fullest stage holds.
        head: the vocabulary's product and the loss, on the last stage.
    """

    setup: Setup
    layers: tuple[tuple[LayerWork, float], ...]
    slowest: float
    last: float
    head: LayerWork
    boundary_bytes: float
    parameters: float = field(default=0.0)
    expert_parameters: float = field(default=0.0)


def work_of(setup: Setup) -> Work:
    """What a transformer's step is made of.

    Raises:
        ValueError: the setup is not of a transformer.
    """
    shape, layout = setup.shape, setup.layout
    if shape is None:
        raise ValueError("only transformers are counted here")
    layers = tuple(_layers(setup, shape))
    total = sum(count for _, count in layers)
    slowest, last = _stages(setup, total)
    head = _head(setup, shape)
    tokens = layout.microbatch * shape.length / layout.cp
    # Each tensor rank sends its part of what is between stages (Megatron's scatter-gather, 2021;
    # DeepSpeed's partitioned pipeline buffers).
    boundary = tokens * shape.hidden * 2 / layout.tp
    per_stage = slowest
    embedding = shape.vocab * shape.hidden / layout.tp
    ends = embedding if layout.pp > 1 or shape.tied else 2 * embedding
    return Work(
        setup=setup,
        layers=layers,
        slowest=slowest,
        last=last,
        head=head,
        boundary_bytes=boundary,
        parameters=per_stage * sum(w.parameters * n for w, n in layers) + ends,
        expert_parameters=per_stage * sum(w.expert_parameters * n for w, n in layers),
    )


def model_parameters(setup: Setup) -> float:
    """Of the whole model."""
    assert setup.shape is not None
    return parameters_of(setup.shape)


def _stages(setup: Setup, total: float) -> tuple[float, float]:
    """The shares of all layers on the fullest stage and on the last one.

    Where layers do not divide but with embedding and head counted they do, stages were cut so.
    """
    layout = setup.layout
    pp = layout.pp
    if pp == 1:
        return 1.0, 1.0
    if total % pp == 0:
        return 1 / pp, 1 / pp
    if (total + 2) % pp == 0:
        return (total + 2) / pp / total, ((total + 2) / pp - 1) / total
    if layout.virtual > 1 or (setup.shape is not None and setup.shape.experts):
        # Uneven chunks are placed so that the head's stage has fewer.
        return 1 / pp, 1 / pp
    full = ceil(total / pp)
    return full / total, (total - full * (pp - 1)) / total if total > full * (pp - 1) else 1 / pp


def _layers(setup: Setup, shape: Shape) -> Iterator[tuple[LayerWork, float]]:
    dense, experts = shape.layers, 0
    if shape.is_hybrid:
        yield _layer(setup, shape, attention=True), shape.attention_layers
        yield _layer(setup, shape, mamba=True), shape.mamba_layers
        rest = shape.layers - shape.attention_layers - shape.mamba_layers
        yield _layer(setup, shape, experts=True), rest
        return
    if shape.experts:
        dense, experts = shape.dense_layers, shape.layers - shape.dense_layers
        yield _layer(setup, shape, attention=True, experts=True), experts
    if dense:
        yield _layer(setup, shape, attention=True, dense=True), dense
    if shape.kind == "t5":
        yield _layer(setup, shape, attention=True, cross=True, dense=True), shape.layers


def _layer(
    setup: Setup,
    shape: Shape,
    *,
    attention: bool = False,
    cross: bool = False,
    dense: bool = False,
    experts: bool = False,
    mamba: bool = False,
) -> LayerWork:
    layout, software = setup.layout, setup.software
    tp = layout.tp
    tokens = layout.microbatch * shape.length / layout.cp
    h = shape.hidden
    own = tokens / tp if software.sequence_parallel else tokens
    products: list[Product] = []
    flash = scores = moved = token_bytes = context = expert_parameters = scan = 0.0
    kernels = exchanges = 0
    if attention:
        for _ in range(2 if cross else 1):
            some, flop, score, bytes_ = _attention(setup, shape, tokens)
            products += some
            flash += flop
            scores += score
            moved += bytes_ + own * h * 11
            kernels += 14 + (LATENT_KERNELS if shape.latent else 0)
            exchanges += 1
        if layout.cp > 1:
            context = 2 * 2 * tokens * (layout.cp - 1) * shape.kv_heads * shape.head_width / tp
    matrices = 2 if shape.gated else 1
    act = 6 if shape.gated else 4
    if dense:
        products.append(Product(tokens, matrices * shape.ffn / tp, h))
        products.append(Product(tokens, h, shape.ffn / tp))
        moved += own * h * 11 + tokens * act * shape.ffn / tp
        kernels += 8
        exchanges += 1
    if mamba:
        width = shape.mamba_width
        products.append(Product(tokens, (2 * width + 2 * 8 * STATE) / tp, h))
        products.append(Product(tokens, h, width / tp))
        flash += 2 * tokens * width / tp * (CHUNK + 2 * STATE)
        moved += own * h * 11
        scan = tokens * width / tp
        kernels += 20
        exchanges += 1
    if experts:
        # With tensor ranks, tokens are split over them before they go to experts.
        sent = tokens / tp * shape.topk
        inner = shape.expert_width or h
        local = max(1.0, shape.experts / layout.ep)
        rows = sent * layout.ep / shape.experts
        products.append(Product(rows, matrices * shape.expert_ffn, inner, count=local, expert=True))
        products.append(Product(rows, inner, shape.expert_ffn, count=local, expert=True))
        products.append(Product(tokens / tp, shape.experts, h))
        if shape.shared_ffn:
            products.append(Product(tokens, matrices * shape.shared_ffn / tp, h))
            products.append(Product(tokens, h, shape.shared_ffn / tp))
            moved += tokens * act * shape.shared_ffn / tp
            kernels += 4
        if shape.expert_width:
            products.append(Product(tokens / tp, inner, h))
            products.append(Product(tokens / tp, h, inner))
        activated = 0 if software.fused_experts else act
        moved += own * h * 11 + sent * (10 * inner + activated * shape.expert_ffn)
        moved += tokens / tp * shape.experts * 12
        kernels += ROUTED + (WEIGHED if shape.topk > 1 else 0)
        token_bytes = 2 * sent * inner
        expert_parameters = local * (matrices + 1) * inner * shape.expert_ffn
    if layout.tp > 1:
        kernels += 2 * exchanges
    if layout.cp > 1:
        kernels += 3 * layout.cp
    if setup.dtype in NARROW:
        # Scales, conversions and transposes before each product.
        kernels += len(products)
    if software.captured or software.fused_experts:
        kernels = OUTSIDE_GRAPHS if experts and not software.fused_experts else 0
    if not software.fused:
        moved *= EAGER
    weights = sum(p.n * p.k * p.count for p in products if p.linear and not p.expert)
    return LayerWork(
        products=tuple(products),
        flash_flop=flash,
        moved_bytes=moved,
        score_bytes=scores,
        kernels=kernels,
        tensor_bytes=2 * tokens * h,
        tensor_exchanges=exchanges if tp > 1 else 0,
        scan=scan,
        token_bytes=token_bytes if layout.ep > 1 else 0.0,
        context_bytes=context,
        parameters=weights,
        expert_parameters=expert_parameters,
    )


def _attention(
    setup: Setup, shape: Shape, tokens: float
) -> tuple[list[Product], float, float, float]:
    """Products, flash FLOP, bytes of scores and of the other elementwise kernels."""
    layout, tp = setup.layout, setup.layout.tp
    h = shape.hidden
    heads = shape.heads / tp
    keys = max(shape.kv_heads / tp, 1)
    width = value = shape.head_width
    if shape.latent:
        width = value + ROTARY
        products = [
            Product(tokens, QUERY_LATENT + KEY_LATENT + ROTARY, h),
            Product(tokens, heads * width, QUERY_LATENT),
            Product(tokens, heads * 2 * value, KEY_LATENT),
            Product(tokens, h, heads * value),
        ]
    else:
        products = [
            Product(tokens, (heads + 2 * keys) * width, h),
            Product(tokens, h, heads * width),
        ]
    moved = tokens * heads * width * (16 if shape.kind not in ("dense_gpt", "bert", "t5") else 8)
    length = shape.length
    pairs = tokens * length * heads  # this rank's queries with all keys
    if setup.software.flash:
        half = 0.5 if shape.causal else 1.0
        return products, 2 * pairs * (width + value) * half, 0.0, moved
    batch = layout.microbatch * heads
    rows = shape.length / layout.cp
    products.append(Product(rows, length, width, count=batch, linear=False))
    products.append(Product(rows, value, length, count=batch, linear=False))
    # Softmax reads and writes; dropout reads, writes and keeps a byte.
    scores = pairs * (4 + (5 if setup.software.dropout else 0))
    if not setup.software.fused:
        scores += pairs * 8
    return products, 0.0, scores, moved


def _head(setup: Setup, shape: Shape) -> LayerWork:
    layout = setup.layout
    tokens = layout.microbatch * shape.length / layout.cp
    # Padded to whole blocks of 128 on each rank (Megatron-LM, make_vocab_size_divisible_by).
    vocab = float(ceil(shape.vocab / layout.tp / 128) * 128)
    logits = tokens * vocab
    return LayerWork(
        products=(Product(tokens, vocab, shape.hidden),),
        moved_bytes=logits * 12,
        kernels=20,
        tensor_bytes=2 * tokens * shape.hidden,
        tensor_exchanges=1 if layout.tp > 1 else 0,
    )
