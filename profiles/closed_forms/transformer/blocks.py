"""Blocks of transformers, drafted: what each kind of layer multiplies, moves and keeps."""

from __future__ import annotations

from collections.abc import Sequence

from profiles.closed_forms.transformer.draft import UnitBuilder
from profiles.closed_forms.transformer.shape import (
    DECODER_SHARE,
    KEY_LATENT,
    MAMBA_STATES,
    QUERY_LATENT,
    ROTARY,
    STATE,
    TransformerShape,
)
from profiles.model.work import AttentionCall, FusibleKind

# Width of a score chunk in state-space layers (Mamba-2: chunk_size).
CHUNK = 128
# Bytes that the convolution and scan of a state-space layer move for an element of its width,
# forward; its kernels stream chunk states through memory (mamba_ssm, ssd_combined.py: five kernels
# that each read and write what the one before left, states in fp32).
SCAN_BYTES = 40.0
# With every fusion that Megatron-Core has (moe_router_fusion, moe_permute_fusion, a dispatcher that
# sends tokens once), forward: choice, auxiliary loss, counts of tokens and their way to the host,
# layout, notice, dispatch, map of rows, permutation, back again, combination; the backward has no
# choices to make.
ROUTER_KERNELS = (14, 9)


def attention(
    draft: UnitBuilder,
    shape: TransformerShape,
    *,
    tokens: float,
    keys: float,
    path: str = "attention",
    cross: float = 0.0,
    is_last: bool = False,
) -> None:
    """Norm, projections, attention, projection, residual.

    Args:
        tokens, keys: queries, and positions that each looks at.
        cross: tokens that keys and values are made of where they are not the queries' own.
    """
    e, h = draft.e, shape.hidden
    queries, values = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    width = value_width = shape.head_width
    draft.norm(h, tokens, rms=shape.gated or shape.is_rotary)
    bias = shape.kind in ("dense_gpt", "bert")
    if shape.latent:
        width = shape.head_width + ROTARY
        draft.linear(f"{path}.down", h, QUERY_LATENT + KEY_LATENT + ROTARY, rows=tokens)
        draft.norm(QUERY_LATENT + KEY_LATENT, tokens, rms=True)
        draft.keep(e * tokens * (QUERY_LATENT + KEY_LATENT + ROTARY), of_product=True)
        draft.linear(f"{path}.queries", QUERY_LATENT, shape.heads * width, rows=tokens)
        # Megatron-LM's module mla_up_proj is computed again under selective recompute.
        draft.keep(e * tokens * shape.heads * width, of_product=True, of_core=True)
        draft.linear(f"{path}.keys", KEY_LATENT, shape.heads * 2 * value_width, rows=tokens)
        draft.keep(e * tokens * shape.heads * (width + value_width), of_product=True, of_core=True)
        kv_heads = shape.heads
    else:
        if cross:
            draft.linear(f"{path}.query", h, queries, rows=tokens, bias=bias)
            draft.keep(e * tokens * queries, of_product=True)
            draft.linear(f"{path}.key_value", h, 2 * values, rows=cross, bias=bias)
            draft.keep(e * cross * 2 * values, of_product=True)
        else:
            # Megatron-LM lays the queries of a group, its key and its value side by side.
            draft.linear(
                f"{path}.qkv", h, queries + 2 * values, rows=tokens, bias=bias, heads=shape.kv_heads
            )
            draft.keep(e * tokens * (queries + 2 * values), of_product=True)
        kv_heads = shape.kv_heads
    if shape.is_rotary:
        # Queries and keys times cosine, turned by half and times sine, added: 5 operations that
        # read and write 2 to 3 tensors each; in one kernel, one read and one write.
        turned = e * tokens * (shape.heads + kv_heads) * (ROTARY if shape.latent else width)
        draft.elementwise(
            FusibleKind.ROTARY,
            fused=(2 * turned, 2 * turned),
            eager=(9 * turned, 9 * turned),
            kernels=(10, 10),
        )
    draft.attention(
        AttentionCall(
            heads=shape.heads,
            kv_heads=kv_heads,
            queries=max(1, round(tokens)),
            keys=max(1, round(keys)),
            width=width,
            value_width=value_width,
            is_causal=shape.causal,
            dropout=shape.dropout,
            element_bytes=e,
        )
    )
    draft.linear(
        f"{path}.output", shape.heads * value_width, h, rows=tokens, bias=bias, is_last=is_last
    )
    residual(draft, shape, tokens)
    wide = e * tokens * (queries + 2 * values)
    draft.transient(e * tokens * h, wide + 2 * e * tokens * h)


def residual(draft: UnitBuilder, shape: TransformerShape, tokens: float) -> None:
    """Dropout, where there is one, and addition to the stream that goes around the layer."""
    e, elements, dropout = draft.e, tokens * shape.hidden, shape.dropout
    draft.elementwise(
        FusibleKind.RESIDUAL,
        fused=((3 * e + dropout) * elements, (2 * e + dropout) * elements),
        eager=(
            (3 * e + (2 * e + 1) * dropout) * elements,
            (3 * e + (2 * e + 1) * dropout) * elements,
        ),
        kernels=(1 + dropout, 1 + dropout),
        saved=(e + dropout) * elements,
    )


def dense(draft: UnitBuilder, shape: TransformerShape, *, tokens: float) -> None:
    """Norm, first product, activation, second product, residual."""
    draft.norm(shape.hidden, tokens, rms=shape.gated or shape.is_rotary)
    feed_forward(draft, shape, shape.ffn, tokens=tokens, path="mlp", is_last=True)
    residual(draft, shape, tokens)


def feed_forward(
    draft: UnitBuilder,
    shape: TransformerShape,
    width: int,
    *,
    tokens: float,
    path: str,
    is_last: bool = False,
) -> None:
    """First product, activation, second product."""
    h, bias = shape.hidden, shape.kind in ("dense_gpt", "bert")
    pieces = (width, width) if shape.gated else ()
    outputs = width * (1 + shape.gated)
    draft.linear(f"{path}.up", h, outputs, rows=tokens, bias=bias, pieces=pieces)
    activation(draft, shape.gated, width * tokens)
    draft.linear(f"{path}.down", width, h, rows=tokens, bias=bias, is_last=is_last)
    draft.transient(draft.e * tokens * h, draft.e * tokens * (width * (1 + shape.gated) + 2 * h))


def activation(draft: UnitBuilder, gated: bool, elements: float, *, is_core: bool = False) -> None:
    """GELU; or SiLU of one half times the other. Product outputs and the result are kept; written
    out, what the gate multiplies is too."""
    e = draft.e
    draft.keep(e * elements * (1 + gated), of_product=True)
    if gated:
        fused, eager, kernels = (3, 5), (5, 8), (2, 3)
    else:
        fused, eager, kernels = (2, 3), (2, 3), (1, 1)
    draft.elementwise(
        FusibleKind.GATE,
        fused=(fused[0] * e * elements, fused[1] * e * elements),
        eager=(eager[0] * e * elements, eager[1] * e * elements),
        kernels=kernels,
        saved=e * elements,
        saved_eager=e * elements * (1 + gated),
    )
    if is_core:  # Megatron-LM's module moe_act
        draft.drop_with_core(e * elements)


def experts(draft: UnitBuilder, shape: TransformerShape, *, tokens: float) -> None:
    """Norm, router, permutation, the experts' products, permutation back; beside them shared ones.

    Tokens are spread evenly over the experts.
    """
    e, h = draft.e, shape.hidden
    inner, width = shape.expert_width or h, shape.expert_ffn
    copies = shape.topk * tokens
    draft.norm(h, tokens, rms=shape.gated or shape.is_rotary)
    # Logits, probabilities and their mask in fp32 (megatron/core/transformer/moe/router.py).
    scores = 4.0 * tokens * shape.experts
    draft.linear("router", h, shape.experts, rows=tokens)
    moved = e * copies * inner
    draft.elementwise(
        FusibleKind.ROUTER,
        fused=(2 * scores + 4 * moved, 3 * scores + 4 * moved),
        eager=(6 * scores + 7 * moved, 9 * scores + 7 * moved),
        kernels=(36, 20),
        fused_kernels=ROUTER_KERNELS,
        saved=3 * scores + moved,
        saved_eager=3 * scores + 2 * moved,
    )
    if shape.expert_width:
        draft.linear("latent.down", h, inner, rows=tokens)
    draft.grouped(width * (1 + shape.gated), inner, experts=shape.experts, rows=copies)
    activation(draft, shape.gated, width * copies, is_core=True)
    draft.grouped(inner, width, experts=shape.experts, rows=copies)
    draft.keep(e * copies * inner, of_product=True)
    if shape.expert_width:
        draft.linear("latent.up", inner, h, rows=tokens)
    if shape.shared_ffn:
        feed_forward(draft, shape, shape.shared_ffn, tokens=tokens, path="shared")
    residual(draft, shape, tokens)
    draft.transient(2 * moved, e * copies * (width * (1 + shape.gated) + inner))


def mamba(draft: UnitBuilder, shape: TransformerShape, *, tokens: float) -> None:
    """Norm, projection in, convolution and scan, gated norm, projection out.

    The kernels keep what goes in and what comes out, and compute the rest again
    (mamba_split_conv1d_scan_combined of mamba_ssm).
    """
    e, h = draft.e, shape.hidden
    width = shape.mamba_width or 2 * h
    draft.norm(h, tokens, rms=True)
    draft.linear("mixer.in", h, 2 * width + MAMBA_STATES, rows=tokens)
    draft.keep(e * tokens * (2 * width + MAMBA_STATES), of_product=True)
    draft.scan(
        flop=2 * tokens * width * (CHUNK + 2 * STATE), moved=SCAN_BYTES * tokens * width, kernels=12
    )
    draft.keep(2 * e * tokens * width)
    draft.linear("mixer.out", width, h, rows=tokens, is_last=True)
    residual(draft, shape, tokens)
    draft.transient(e * tokens * h, e * tokens * (2 * width + MAMBA_STATES))


Block = tuple[str, int]
"""A kind of block and how many there are in a row."""


def order_of(shape: TransformerShape) -> Sequence[Block]:
    """Blocks in call order, equal neighbours together."""
    if shape.is_hybrid:
        rest = shape.layers - shape.attention_layers - shape.mamba_layers
        return _mixed(
            {"mamba": shape.mamba_layers, "experts": rest, "attention": shape.attention_layers}
        )
    if shape.kind == "t5":
        return [("dense", shape.layers), ("decoder", shape.layers)]
    if shape.experts:
        dense_layers = [("dense", shape.dense_layers)] if shape.dense_layers else []
        return [*dense_layers, ("expert", shape.layers - shape.dense_layers)]
    return [("dense", shape.layers)]


def _mixed(counts: dict[str, int]) -> list[Block]:
    """Kinds spread evenly over the depth, as hybrids arrange them."""
    places = sorted(
        ((index + 0.5) / count, kind) for kind, count in counts.items() for index in range(count)
    )
    blocks: list[Block] = []
    for _, kind in places:
        if blocks and blocks[-1][0] == kind:
            blocks[-1] = kind, blocks[-1][1] + 1
        else:
            blocks.append((kind, 1))
    return blocks


def write_block(draft: UnitBuilder, shape: TransformerShape, kind: str) -> None:
    """Build a block of this kind."""
    tokens = float(shape.length)
    # Transformer-XL looks back on a memory as long as the segment.
    keys = tokens * (2 if shape.kind == "transformer_xl" else 1)
    match kind:
        case "dense":
            attention(draft, shape, tokens=tokens, keys=keys)
            dense(draft, shape, tokens=tokens)
        case "expert":
            attention(draft, shape, tokens=tokens, keys=keys)
            experts(draft, shape, tokens=tokens)
        case "decoder":
            own = tokens / DECODER_SHARE
            attention(draft, shape, tokens=own, keys=own)
            attention(draft, shape, tokens=own, keys=tokens, cross=tokens, path="cross")
            dense(draft, shape, tokens=own)
        case "attention":
            attention(draft, shape, tokens=tokens, keys=keys, is_last=True)
        case "experts":
            experts(draft, shape, tokens=tokens)
        case "mamba":
            mamba(draft, shape, tokens=tokens)
        case _:
            raise ValueError(f"no block of kind {kind}")
