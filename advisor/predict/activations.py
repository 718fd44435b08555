"""Activations: the bytes that one layer keeps of one microbatch on one rank, from its operations.

Each operation keeps what its gradient needs. In units of `tokens x hidden x bytes of an element` a
classic layer keeps: the input of both norms (2), of the projections after them (2), queries, keys
and values (3), the attention's output (1), before and after the nonlinearity (4 + 4); in 16 bits
that is 32 bytes, with two masks of dropout the 34 of arXiv 2205.05198, beside 5 bytes a score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from advisor.predict.setup import Setup, Shape
from advisor.predict.work import KEY_LATENT, QUERY_LATENT, ROTARY

# A T5's decoder sees a quarter of the encoder's tokens: 128 of 512 (Megatron-LM and NeMo T5 runs).
DECODER_SHARE = 4
# Log-sum-exp of a row of scores, kept by kernels that keep no scores: one fp32 a head and token.
SUM_BYTES = 4
# Router: logits, probabilities and their mask in fp32 (megatron/core/transformer/moe/router.py).
ROUTER_BYTES = 12
# Mamba-2: B and C of 8 groups of 128 states (nemotron-3 configurations).
MAMBA_STATES = 2 * 8 * 128


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes from a layer's forward to its backward.

    Attributes:
        input: its input alone; what is kept when the whole layer is computed again.
        selective: what selective recompute drops and brings back: the attention core's scores, what
            comes out of latents, and of experts the nonlinearity's output (Megatron-LM's modules
            core_attn, mla_up_proj and moe_act).
        matrices: outputs of attention and of every other matrix product: what torchtitan's policy
            over operators keeps (`_get_custom_policy`: "except every second mm").
        all: everything, scores included.
        gradients: what a backward adds to it at the fullest: gradients of the widest tensors. What
            was kept is let go of as its gradient is known, the layer's last operation first.
    """

    input: float
    selective: float
    matrices: float
    all: float
    gradients: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a rank sees of a microbatch of `batch` sequences.

    Attributes:
        keys: positions that a token looks at; with Transformer-XL's memory twice the sequence's.
        whole: tokens.
        split: tokens outside the parts that tensor parallelism divides.
        element: bytes of a number.
        product: bytes that a matrix product keeps of a number of its input; one of 8-bit floats.
    """

    batch: int
    keys: float
    whole: float
    split: float
    element: float
    product: float


def tokens_of(setup: Setup) -> Tokens:
    layout, shape = setup.layout, transformer_of(setup)
    whole = layout.microbatch * shape.length / layout.cp
    half = setup.dtype not in ("float32", "tfloat32")
    return Tokens(
        batch=layout.microbatch,
        keys=shape.length * (2 if shape.kind == "transformer_xl" else 1),
        whole=whole,
        split=whole / layout.tp if setup.software.sequence_parallel else whole,
        element=2.0 if half else 4.0,
        product=1.0 if setup.dtype.startswith(("float8", "float4")) else 2.0 if half else 4.0,
    )


def kept_by(setup: Setup, kind: str) -> Kept:
    """What a layer of `kind` keeps of one microbatch: a key of `LAYERS`."""
    return LAYERS[kind](setup, tokens_of(setup))


def transformer_of(setup: Setup) -> Shape:
    """The shape of a setup.

    Raises:
        ValueError: it has none: the network is of convolutions.
    """
    if setup.shape is None:
        raise ValueError(f"{setup.row_id} is no transformer")
    return setup.shape


def _attention(setup: Setup, tokens: Tokens, *, keys: float, cross: bool = False) -> Kept:
    """Norm, projections, core, projection, dropout. `keys`: positions that are looked at."""
    shape, software, tp = transformer_of(setup), setup.software, setup.layout.tp
    e, product = tokens.element, tokens.product
    queries = shape.heads * shape.head_width
    values = 2 * shape.kv_heads * shape.head_width
    of_keys = tokens.batch * keys / setup.layout.cp if cross else tokens.whole
    inputs = e * shape.hidden * tokens.split
    projected, again = e * (queries * tokens.whole + values * of_keys) / tp, 0.0
    if shape.latent:
        # Keys are as wide as queries and hold the rotary part; latents are kept on every rank, and
        # what is projected up from them can be computed again.
        again = e * tokens.whole * (3 * queries + 2 * shape.heads * ROTARY) / tp
        projected = again + 2 * e * tokens.split * (QUERY_LATENT + KEY_LATENT + ROTARY)
    context = e * queries * tokens.whole / tp
    if product < e:
        context += product * queries * tokens.whole / tp
    normed = product * shape.hidden * (tokens.whole if software.keeps_gathered else tokens.split)
    mask = shape.hidden * tokens.split if software.dropout else 0.0
    if software.flash:
        scores = SUM_BYTES * shape.heads / tp * tokens.whole
    else:
        # Probabilities; under dropout also the mask and what is left of them.
        each = 2 * e + 1 if software.dropout else e
        scores = each * shape.heads / tp * tokens.whole * keys
    # Of queries, keys, values and what follows the core, the first and the third.
    matrices = inputs + context + projected - e * values / 2 * of_keys / tp
    total = inputs + normed + projected + context + mask + scores
    if not software.fused and shape.gated:
        total += 2 * inputs  # RMSNorm's input in fp32; LayerNorm has a kernel of its own
    # Of the scores one gradient, in whose place the softmax's is computed; of what is projected; of
    # what goes around.
    wide = 0.0 if software.flash else e * shape.heads / tp * tokens.whole * keys
    return Kept(
        input=inputs,
        selective=scores + again,
        matrices=matrices,
        all=total,
        gradients=wide + projected + 2 * inputs,
    )


def _mlp(setup: Setup, tokens: Tokens, width: int) -> Kept:
    """Norm, first product, nonlinearity, second product, dropout."""
    shape, software, tp = transformer_of(setup), setup.software, setup.layout.tp
    e, product = tokens.element, tokens.product
    inputs = e * shape.hidden * tokens.split
    normed = product * shape.hidden * (tokens.whole if software.keeps_gathered else tokens.split)
    before = e * width * (2 if shape.gated else 1) * tokens.whole / tp
    after = product * width * tokens.whole / tp
    mask = shape.hidden * tokens.split if software.dropout else 0.0
    total = inputs + normed + before + after + mask
    if not software.fused and shape.gated:
        total += 2 * inputs + e * width * tokens.whole / tp  # before and after the gate
    return Kept(
        input=inputs,
        selective=0.0,
        # Of gate, up and down the first and the last; of two products the first.
        matrices=before / 2 + inputs if shape.gated else before,
        all=total,
        gradients=before + 2 * inputs,
    )


def _experts(setup: Setup, tokens: Tokens) -> Kept:
    """Norm, router, exchange, the experts' two products, exchange back; beside them shared ones.

    The copies of a token are spread evenly over the experts. Ranks that split an expert all see all
    of its tokens; ranks that do not, see their share.
    """
    shape, layout, e = transformer_of(setup), setup.layout, tokens.element
    copies = shape.topk * tokens.whole / layout.tp
    inner = shape.expert_width or shape.hidden
    within = expert_ranks(setup)
    copies *= within
    width = shape.expert_ffn / within
    inputs = e * shape.hidden * tokens.split
    normed = tokens.product * shape.hidden * tokens.split
    routed = ROUTER_BYTES * shape.experts * tokens.split
    sent = tokens.product * inner * copies
    before = e * width * (2 if shape.gated else 1) * copies
    after = tokens.product * width * copies
    back = e * inner * copies
    total = inputs + normed + routed + sent + before + after + back
    matrices = inputs + before + back
    if shape.shared_ffn:
        shared = _mlp(setup, tokens, shape.shared_ffn)
        total += shared.all - shared.input - normed
        matrices += shared.matrices - shared.input
    return Kept(
        input=inputs,
        selective=after,
        matrices=matrices,
        all=total,
        gradients=before + back + 2 * inputs,
    )


def _mamba(setup: Setup, tokens: Tokens) -> Kept:
    """Norm, projection in, convolution and scan as one kernel, gated norm, projection out.

    The kernel keeps what went in and what came out, and computes the rest again
    (mamba_split_conv1d_scan_combined of mamba_ssm, which Megatron-LM's mixer calls).
    """
    shape, e, tp = transformer_of(setup), tokens.element, setup.layout.tp
    inputs = e * shape.hidden * tokens.split
    inner = mamba_width(shape)
    projected = e * (2 * inner + MAMBA_STATES) * tokens.whole / tp
    scanned = 2 * e * inner * tokens.whole / tp
    total = 2 * inputs + projected + scanned
    return Kept(
        input=inputs,
        selective=0.0,
        matrices=inputs + projected,
        all=total,
        gradients=projected + 2 * inputs,
    )


def mamba_width(shape: Shape) -> int:
    """Inner width of a state-space layer; twice the model's unless its configuration says."""
    return shape.mamba_width or 2 * shape.hidden


def _together(*parts: Kept) -> Kept:
    """A layer of several parts; its input is the first one's. Backward goes from the last."""
    gone, fullest = 0.0, 0.0
    for part in reversed(parts):
        fullest = max(fullest, part.gradients - gone)
        gone += part.all
    return Kept(
        input=parts[0].input,
        selective=sum(part.selective for part in parts),
        matrices=sum(part.matrices for part in parts),
        all=sum(part.all for part in parts),
        gradients=fullest,
    )


def _dense_layer(setup: Setup, tokens: Tokens) -> Kept:
    attention = _attention(setup, tokens, keys=tokens.keys)
    return _together(attention, _mlp(setup, tokens, transformer_of(setup).ffn))


def _expert_layer(setup: Setup, tokens: Tokens) -> Kept:
    return _together(_attention(setup, tokens, keys=tokens.keys), _experts(setup, tokens))


def _decoder_layer(setup: Setup, tokens: Tokens) -> Kept:
    """A T5's: it looks at itself, then at what the encoder made."""
    own = replace(
        tokens,
        keys=tokens.keys / DECODER_SHARE,
        whole=tokens.whole / DECODER_SHARE,
        split=tokens.split / DECODER_SHARE,
    )
    return _together(
        _attention(setup, own, keys=own.keys),
        _attention(setup, own, keys=tokens.keys, cross=True),
        _mlp(setup, own, transformer_of(setup).ffn),
    )


def _lone_attention(setup: Setup, tokens: Tokens) -> Kept:
    return _attention(setup, tokens, keys=tokens.keys)


LAYERS: Mapping[str, Callable[[Setup, Tokens], Kept]] = MappingProxyType(
    {
        "dense": _dense_layer,
        "expert": _expert_layer,
        "decoder": _decoder_layer,
        "attention": _lone_attention,
        "experts": _experts,
        "mamba": _mamba,
    }
)


def expert_ranks(setup: Setup) -> int:
    """Over how many tensor-parallel ranks each expert is split.

    Megatron-LM splits it like the rest unless told not to, and recipes do not split narrow experts
    (--expert-tensor-parallel-size 1). Where the expert ranks reach beyond the data-parallel ones,
    they take tensor-parallel ranks, and what is left splits the experts.
    """
    layout, shape = setup.layout, transformer_of(setup)
    if layout.ep > layout.dp * layout.cp:
        return min(layout.tp, layout.dp * layout.cp * layout.tp // layout.ep)
    return 1 if shape.gated else layout.tp
