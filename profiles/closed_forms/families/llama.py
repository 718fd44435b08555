"""Llama and its kin: decoders with rotary positions, RMS norms and gated layers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from profiles.closed_forms.families import kernels
from profiles.closed_forms.families import operations as ops
from profiles.closed_forms.families.attention import (
    attend,
    causal_mask,
    heads,
    positions,
    repeated,
    rotary_table,
    rotate,
    rotate_partly,
)
from profiles.closed_forms.families.fields import SIZES, Fields
from profiles.closed_forms.families.layers import ACTIVATIONS, activate, head, next_token_loss
from profiles.closed_forms.families.memory import DType
from profiles.closed_forms.families.network import FamilyRun, FamilyUnit, ModelFamily
from profiles.closed_forms.families.tape import Array
from profiles.model.layers import LayerKind

_PREFIXES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "phi3": "Phi3",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe",
    "deepseek_v3": "DeepseekV3",
}
# What transformers takes where the file names nothing and it is not the plain rule.
_KEY_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32, "gemma": 16, "mixtral": 8, "qwen3_moe": 4}
_HEAD_WIDTH = {"qwen3": 128, "gemma": 256}
# Widest heads of which transformers leaves it to the kernel to share keys and values (5.23,
# `use_gqa_in_sdpa`); with a mask it never does.
_GROUPED = 256
_POSITIONS = {
    "llama": 2048,
    "mistral": 131_072,
    "qwen2": 32_768,
    "qwen3": 32_768,
    "gemma": 8192,
    "phi3": 4096,
    "mixtral": 131_072,
    "qwen3_moe": 32_768,
    "deepseek_v3": 4096,
}


@dataclass(frozen=True, slots=True)
class LlamaVariant:
    """Differences between the members of the family.

    Attributes:
        prefix: of the class names of modules ("Llama").
        inner: width of the gated layer.
        head: width of a head.
        windows: for each layer how many tokens it sees, where that is bounded.
        rotary: how much of a head is turned.
        has_head_norms: queries and keys are normalised head by head (Qwen3).
        is_fused: one matrix for queries, keys and values, one for gate and up (Phi-3).
        is_gemma: norms scale by one plus the weight, embeddings are scaled.
    """

    prefix: str
    vocab: int
    hidden: int
    inner: int
    heads: int
    key_heads: int
    head: int
    activation: str
    windows: tuple[int | None, ...]
    input_bias: bool
    output_bias: bool
    mlp_bias: bool
    attention_dropout: float
    residual_dropout: float
    rotary: float
    has_head_norms: bool
    is_fused: bool
    is_gemma: bool
    is_tied: bool


FeedForward = Callable[[FamilyUnit, LlamaVariant, int, Array], Array]
"""(block, shape, index of the layer, hidden) to hidden."""
Attention = Callable[[FamilyUnit, LlamaVariant, Array, Array | None, Array, Array], Array]
"""(block, shape, hidden, mask, cosines, sines) to hidden."""


def family(fields: Fields) -> ModelFamily:
    """A dense decoder with its language-model head."""
    return decoder(fields, gated, lambda layer: "dense")


def decoder(
    fields: Fields,
    feed_forward: FeedForward,
    kind_of: Callable[[int], Hashable],
    attention: Attention | None = None,
) -> ModelFamily:
    """The model; `kind_of` tells apart layers whose `feed_forward` differs."""
    attend_to = attention or _attention
    shape = read(fields)
    kind = fields.architecture(f"{shape.prefix}ForCausalLM", default=f"{shape.prefix}ForCausalLM")
    longest = fields.size("max_position_embeddings", _POSITIONS[fields.family])
    return ModelFamily(
        kind,
        lambda network: _run(network, shape, attend_to, feed_forward, kind_of),
        longest=longest,
    )


def read(fields: Fields) -> LlamaVariant:
    """The shape of a dense or mixture-of-experts model of this family."""
    kind = fields.family
    fields.require(*SIZES)
    hidden, count = fields.size("hidden_size"), fields.size("num_attention_heads")
    is_latent = kind == "deepseek_v3"  # heads have widths of their own
    if not is_latent and (kind == "llama" or not fields.has("head_dim")):
        fields.heads("hidden_size", "num_attention_heads")
    has_bias = kind in ("llama", "qwen3", "gemma", "qwen3_moe", "deepseek_v3")
    bias = fields.flag("attention_bias", False) if has_bias else False
    if kind == "gemma":
        fields.only("use_bidirectional_attention", None, False)
    usual = count if fields.is_null("num_key_value_heads") else _KEY_HEADS.get(kind, count)
    key_heads = fields.size("num_key_value_heads", usual)
    if count % key_heads:
        raise fields.refusal("num_key_value_heads", key_heads, f"a divisor of {count} is wanted")
    return LlamaVariant(
        prefix=_PREFIXES[kind],
        vocab=fields.size("vocab_size"),
        hidden=hidden,
        inner=fields.size("intermediate_size"),
        heads=count,
        key_heads=key_heads,
        head=fields.size("qk_rope_head_dim")
        if is_latent
        else fields.size("head_dim", _HEAD_WIDTH.get(kind, hidden // count)),
        activation=fields.choice(
            "hidden_act", "gelu_pytorch_tanh" if kind == "gemma" else "silu", ACTIVATIONS
        ),
        windows=_windows(fields, fields.size("num_hidden_layers")),
        input_bias=bias or kind == "qwen2",
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False) if kind == "llama" else False,
        attention_dropout=fields.share("attention_dropout", 0.0),
        residual_dropout=fields.share("resid_pdrop", 0.0) if kind == "phi3" else 0.0,
        rotary=_rotary(fields) if kind == "phi3" else 1.0,
        has_head_norms=kind.startswith("qwen3"),
        is_fused=kind == "phi3",
        is_gemma=kind == "gemma",
        is_tied=fields.flag("tie_word_embeddings", kind == "gemma"),
    )


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    kind = fields.family
    if kind in ("mistral", "phi3", "mixtral"):
        width = fields.optional_size("sliding_window", 4096 if kind == "mistral" else None)
        return (width,) * layers
    slides = kind.startswith("qwen") and fields.flag("use_sliding_window", False)
    width = fields.optional_size("sliding_window", 4096) if slides else None
    if kind not in ("qwen2", "qwen3"):
        return (width,) * layers
    types = fields.words("layer_types", layers)
    if "sliding_attention" in types and width is None:
        raise fields.refusal(
            "layer_types", "sliding_attention", "`use_sliding_window`, `sliding_window` are wanted"
        )
    if types:
        return tuple(width if name == "sliding_attention" else None for name in types)
    first = fields.size("max_window_layers", 28, least=0)
    return tuple(width if layer >= first else None for layer in range(layers))


def _rotary(fields: Fields) -> float:
    inner = fields.inner("rope_parameters")
    return inner.share("partial_rotary_factor", fields.share("partial_rotary_factor", 1.0))


def _run(
    network: FamilyRun,
    shape: LlamaVariant,
    attention: Attention,
    feed_forward: FeedForward,
    kind_of: Callable[[int], Hashable],
) -> tuple[Array, ...]:
    embedding = network.unit(
        "model.embed_tokens", "GemmaTextScaledWordEmbedding" if shape.is_gemma else "Embedding"
    )
    hidden = embedding(_embed, network.ids(), shape=shape)
    position_ids = positions(network)
    always = (None,) if shape.prefix in ("Qwen2", "Qwen3") else ()
    masks = {
        window: causal_mask(network, position_ids, window=window)
        for window in dict.fromkeys((*always, *shape.windows))
    }
    rotary = network.unit("model.rotary_emb", f"{shape.prefix}RotaryEmbedding")
    width = int(shape.head * shape.rotary)
    cosine, sine = rotary(rotary_table, hidden, position_ids, width=width)
    kinds = [(window, kind_of(layer)) for layer, window in enumerate(shape.windows)]
    for layer in network.layers("model.layers", kinds):
        block = network.unit(f"model.layers.{layer}", f"{shape.prefix}DecoderLayer", is_block=True)
        hidden = block(
            _layer,
            hidden,
            masks[shape.windows[layer]],
            cosine,
            sine,
            position_ids,
            shape=shape,
            layer=layer,
            attention=attention,
            feed_forward=feed_forward,
        )
    norm = network.unit("model.norm", f"{shape.prefix}RMSNorm")
    hidden = norm(lambda unit, x: _norm(unit, shape, x, ""), hidden)
    logits = head(network, hidden, shape.vocab, embedding if shape.is_tied else None)
    return next_token_loss(network, logits), logits


def _embed(unit: FamilyUnit, ids: Array, *, shape: LlamaVariant) -> Array:
    if not shape.is_gemma:
        return unit.embedding(ids, "", shape.vocab, shape.hidden)
    weight = unit.parameter("weight", shape.vocab, shape.hidden)

    def scaled() -> Array:
        hidden = kernels.embedding(weight, ids)
        return ops.mul(hidden, ops.cast(unit.buffer(), hidden.dtype))

    return unit.layer("", LayerKind.EMBEDDING, ids, weight, None, scaled)


def _layer(
    unit: FamilyUnit,
    hidden: Array,
    mask: Array | None,
    cosine: Array,
    sine: Array,
    position_ids: Array,
    *,
    shape: LlamaVariant,
    layer: int,
    attention: Attention,
    feed_forward: FeedForward,
) -> Array:
    residual = hidden
    hidden = _norm(unit, shape, hidden, "input_layernorm")
    hidden = attention(unit, shape, hidden, mask, cosine, sine)
    hidden = ops.add(residual, ops.dropout(hidden, shape.residual_dropout))
    residual = hidden
    hidden = _norm(unit, shape, hidden, "post_attention_layernorm")
    hidden = feed_forward(unit, shape, layer, hidden)
    return ops.add(residual, ops.dropout(hidden, shape.residual_dropout))


def _attention(
    unit: FamilyUnit,
    shape: LlamaVariant,
    hidden: Array,
    mask: Array | None,
    cosine: Array,
    sine: Array,
) -> Array:
    widths = [count * shape.head for count in (shape.heads, shape.key_heads, shape.key_heads)]
    if shape.is_fused:
        fused = unit.linear(hidden, "self_attn.qkv_proj", sum(widths), bias=False)
        query, key, value = (ops.narrow(fused, -1, width) for width in widths)
        query, key, value = (heads(x, shape.head) for x in (query, key, value))
        query, key = (rotate_partly(x, cosine, sine) for x in (query, key))
    else:
        query, key, value = (
            _projected(unit, shape, hidden, name, width)
            for name, width in zip("qkv", widths, strict=True)
        )
        query, key = (rotate(x, cosine, sine) for x in (query, key))
    if mask or shape.head > _GROUPED:
        times = shape.heads // shape.key_heads
        key, value = repeated(key, times), repeated(value, times)
    hidden = attend(
        query, key, value, mask, dropout=shape.attention_dropout, is_causal=mask is None
    )
    return unit.linear(hidden, "self_attn.o_proj", shape.hidden, bias=shape.output_bias)


def _projected(
    unit: FamilyUnit, shape: LlamaVariant, hidden: Array, name: str, width: int
) -> Array:
    x = unit.linear(hidden, f"self_attn.{name}_proj", width, bias=shape.input_bias)
    x = ops.reshape(x, *x.shape[:-1], -1, shape.head)
    if shape.has_head_norms and name != "v":
        x = unit.rms_norm(x, f"self_attn.{name}_norm")
    return ops.transpose(x, 1, 2)


def gated(
    unit: FamilyUnit,
    shape: LlamaVariant,
    layer: int,
    hidden: Array,
    *,
    path: str = "mlp",
    inner: int | None = None,
) -> Array:
    """activation(gate) * up, and down again; by default of the width that `shape` has."""
    inner, bias = inner or shape.inner, shape.mlp_bias
    if shape.is_fused:
        both = unit.linear(hidden, f"{path}.gate_up_proj", 2 * inner, bias=bias)
        gate, up = ops.split(both, [inner, inner])
        product = ops.mul(up, activate(gate, shape.activation))
    else:
        gate = activate(
            unit.linear(hidden, f"{path}.gate_proj", inner, bias=bias), shape.activation
        )
        product = ops.mul(gate, unit.linear(hidden, f"{path}.up_proj", inner, bias=bias))
    return unit.linear(product, f"{path}.down_proj", shape.hidden, bias=bias)


def _norm(unit: FamilyUnit, shape: LlamaVariant, x: Array, path: str) -> Array:
    if not shape.is_gemma:
        return unit.rms_norm(x, path)
    weight = unit.parameter(f"{path}.weight" if path else "weight", x.shape[-1])
    with unit.module("RMSNorm"):
        exact = ops.cast(x, DType.FLOAT32)
        scaled = ops.mul(exact, ops.rsqrt(ops.add_number(ops.mean_last(ops.power(exact)))))
        scale = ops.add_number(ops.cast(weight, DType.FLOAT32))
        return ops.cast(ops.mul(scaled, scale), x.dtype)
