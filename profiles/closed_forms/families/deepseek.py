"""DeepSeek-V3: latent attention, and experts chosen by groups with some shared by all tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

from profiles.closed_forms.families import kernels, llama
from profiles.closed_forms.families import operations as ops
from profiles.closed_forms.families.attention import attend, rotate
from profiles.closed_forms.families.fields import Fields
from profiles.closed_forms.families.fusing import ALONE
from profiles.closed_forms.families.llama import LlamaVariant
from profiles.closed_forms.families.memory import DType
from profiles.closed_forms.families.moe import experts, gathered, top
from profiles.closed_forms.families.network import FamilyUnit, ModelFamily
from profiles.closed_forms.families.tape import Array
from profiles.model.kernel_cycles import POINTWISE


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of multi-head latent attention (arXiv:2412.19437, section 2.1.1).

    Attributes:
        query_rank, key_rank: widths of what queries, and keys with values, are compressed to;
            queries are not where it is None.
        plain, turned, value: widths of a head: without and with rotary positions, and of values.
        is_interleaved: neighbours are turned as pairs, not the halves of a head.
    """

    query_rank: int | None
    key_rank: int
    plain: int
    turned: int
    value: int
    is_interleaved: bool


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts of a layer: each token is sent to `chosen` of them, which are in `kept_groups` of the
    `groups`; `shared` work for every token."""

    experts: int
    chosen: int
    inner: int
    groups: int
    kept_groups: int
    shared: int
    is_normalised: bool


def deepseek_v3(fields: Fields) -> ModelFamily:
    """A decoder whose first layers are dense and the others mixtures of experts."""
    fields.only("output_router_logits", False, None)
    fields.require("num_key_value_heads", "n_routed_experts", "moe_intermediate_size")
    fields.require("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    if fields.size("num_key_value_heads") != fields.size("num_attention_heads"):
        heads = fields.size("num_attention_heads")
        kv_heads = fields.size("num_key_value_heads")
        raise fields.refusal(
            "num_key_value_heads", kv_heads, f"{heads}, one for each head, is wanted"
        )
    latent = Latent(
        query_rank=fields.optional_size("q_lora_rank", 1536),
        key_rank=fields.size("kv_lora_rank"),
        plain=fields.size("qk_nope_head_dim"),
        turned=fields.size("qk_rope_head_dim"),
        value=fields.size("v_head_dim"),
        is_interleaved=fields.flag("rope_interleave", True),
    )
    mixture = Mixture(
        experts=fields.size("n_routed_experts"),
        chosen=fields.size("num_experts_per_tok", 8),
        inner=fields.size("moe_intermediate_size"),
        groups=fields.size("n_group", 8),
        kept_groups=fields.size("topk_group", 4),
        shared=fields.size("n_shared_experts", 1),
        is_normalised=fields.flag("norm_topk_prob", True),
    )
    fields.divides("n_group", mixture.groups, "n_routed_experts", mixture.experts)
    dense = fields.size("first_k_dense_replace", 3, least=0)

    def feed_forward(unit: FamilyUnit, shape: LlamaVariant, layer: int, hidden: Array) -> Array:
        if layer < dense:
            return llama.gated(unit, shape, layer, hidden)
        return _mixture(unit, shape, mixture, layer, hidden)

    def attention(
        unit: FamilyUnit,
        shape: LlamaVariant,
        hidden: Array,
        mask: Array | None,
        cosine: Array,
        sine: Array,
    ) -> Array:
        return _attention(unit, shape, latent, hidden, mask, cosine, sine)

    family = llama.decoder(fields, feed_forward, lambda layer: layer < dense, attention)
    return replace(family, experts_per_token=mixture.chosen)


# Attention


def _attention(
    unit: FamilyUnit,
    shape: LlamaVariant,
    latent: Latent,
    hidden: Array,
    mask: Array | None,
    cosine: Array,
    sine: Array,
) -> Array:
    samples, length = hidden.shape[:2]
    width = latent.plain + latent.turned
    if latent.query_rank is None:
        query = unit.linear(hidden, "self_attn.q_proj", shape.heads * width, bias=False)
    else:
        rank, bias = latent.query_rank, shape.output_bias
        query = unit.linear(hidden, "self_attn.q_a_proj", rank, bias=bias)
        query = unit.rms_norm(query, "self_attn.q_a_layernorm")
        query = unit.linear(query, "self_attn.q_b_proj", shape.heads * width, bias=False)
    query = ops.transpose(ops.reshape(query, samples, length, -1, width), 1, 2)
    query_plain, query_turned = ops.split(query, [latent.plain, latent.turned])
    compressed = unit.linear(
        hidden,
        "self_attn.kv_a_proj_with_mqa",
        latent.key_rank + latent.turned,
        bias=shape.output_bias,
    )
    keys, key_turned = ops.split(compressed, [latent.key_rank, latent.turned])
    keys = unit.rms_norm(keys, "self_attn.kv_a_layernorm")
    keys = ops.reshape(keys, samples, 1, length, latent.key_rank)
    key_turned = ops.reshape(key_turned, samples, 1, length, latent.turned)
    turn = _rotate_pairs if latent.is_interleaved else rotate
    query_turned, key_turned = (turn(x, cosine, sine) for x in (query_turned, key_turned))
    query = ops.cat([query_plain, query_turned])
    key, value = _keys_and_values(unit, shape, latent, keys, key_turned)
    out = attend(query, key, value, mask, dropout=shape.attention_dropout, is_causal=mask is None)
    return unit.linear(out, "self_attn.o_proj", shape.hidden, bias=shape.output_bias)


def _keys_and_values(
    unit: FamilyUnit, shape: LlamaVariant, latent: Latent, keys: Array, turned: Array
) -> tuple[Array, Array]:
    """Of every head, from what they were compressed to; the turned part of keys is shared."""
    samples, _, length, _ = keys.shape
    width = latent.plain + latent.value
    keys = unit.linear(keys, "self_attn.kv_b_proj", shape.heads * width, bias=False)
    keys = ops.transpose(ops.reshape(keys, samples, length, -1, width), 1, 2)
    plain, value = ops.split(keys, [latent.plain, latent.value])
    turned = ops.expand(turned, samples, shape.heads, length, latent.turned)
    return ops.filled([plain, turned], keys.dtype), value


def _rotate_pairs(x: Array, cosine: Array, sine: Array) -> Array:
    """Turn a head's (samples, heads, length, width) by its position, neighbours as pairs."""
    half = x.shape[-1] // 2
    cosine, sine = (
        ops.reshape(ops.narrow(table, -1, half), 1, *table.shape[:-1], half)
        for table in (cosine, sine)
    )
    even, odd = ops.every_second(x), ops.every_second(x)
    return ops.cat(
        [
            ops.sub(ops.mul(even, cosine), ops.mul(odd, sine)),
            ops.add(ops.mul(odd, cosine), ops.mul(even, sine)),
        ]
    )


# Experts


def _mixture(
    unit: FamilyUnit, shape: LlamaVariant, mixture: Mixture, layer: int, hidden: Array
) -> Array:
    with unit.module("Router"):
        _logits, weights, places = _route(unit, shape, mixture, hidden)
    rows = ops.reshape(hidden, -1, hidden.shape[-1])
    rows = experts(unit, shape, rows, places, weights, count=mixture.experts, inner=mixture.inner)
    out = ops.reshape(rows, *hidden.shape)
    del rows
    inner = mixture.shared * mixture.inner
    return ops.add(
        out, llama.gated(unit, shape, layer, hidden, path="mlp.shared_experts", inner=inner)
    )


def _route(
    unit: FamilyUnit, shape: LlamaVariant, mixture: Mixture, hidden: Array
) -> tuple[Array, Array, Array]:
    """Scores of all experts, and the weights and numbers of the chosen ones.

    Groups of experts are ranked by their best two, and the experts of the best groups by
    themselves, with a bias that only takes part in the choice.
    """
    tape = hidden.tape
    rows = ops.reshape(hidden, -1, shape.hidden)
    weight = unit.parameter("mlp.gate.weight", mixture.experts, shape.hidden)
    rows, weight = ops.cast(rows, DType.FLOAT32), ops.cast(weight, DType.FLOAT32)
    logits = kernels.linear(rows, weight)
    del rows, weight
    scores = ops.unary_by_result(logits)
    ranked = ops.add(scores, unit.buffer(mixture.experts))
    grouped = ops.reshape(ranked, -1, mixture.groups, mixture.experts // mixture.groups)
    of_groups = ops.sum_over(top(grouped, 2)[0], -1)
    del grouped
    best = top(of_groups, mixture.kept_groups)[1]
    mask = tape.run([of_groups], of_groups.shape, of_groups.dtype)
    tape.launch([mask, best], [mask], fusing=ALONE)
    each = mixture.experts // mixture.groups
    wide = ops.expand(ops.reshape(mask, *mask.shape, 1), *mask.shape, each)
    wide = ops.reshape(wide, -1, mixture.experts)
    ranked = _without(ranked, wide)
    places = top(ranked, mixture.chosen)[1]
    weights = gathered(scores, places, places.shape, by_index=False)
    if mixture.is_normalised:
        total = ops.add_number(ops.sum_over(weights, -1, keep=True))
        weights = ops.div(weights, total, in_place=True)
    return logits, ops.mul_number(weights), places


def _without(scores: Array, mask: Array) -> Array:
    """The scores, minus infinity where the mask is zero."""
    tape, shape, dtype = scores.tape, scores.shape, scores.dtype
    left_out = tape.run([tape.run([mask], shape, DType.BOOL)], shape, DType.BOOL)
    out = tape.run([scores, left_out], shape, dtype, kernel=POINTWISE)
    saved = tape.save(left_out)
    tape.record([out], [scores], lambda g: [g.tape.run([g, saved], shape, dtype, kernel=POINTWISE)])
    return out
