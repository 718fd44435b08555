"""Mixtures of experts: Llama-like decoders whose gated layers are many, of which a few are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from profiles.closed_forms.families import kernels, llama
from profiles.closed_forms.families import operations as ops
from profiles.closed_forms.families.fields import Fields
from profiles.closed_forms.families.fusing import ALONE, GATHER
from profiles.closed_forms.families.layers import activate
from profiles.closed_forms.families.layouts import Shape
from profiles.closed_forms.families.llama import LlamaVariant
from profiles.closed_forms.families.memory import DType
from profiles.closed_forms.families.network import FamilyUnit, ModelFamily
from profiles.closed_forms.families.tape import Array, Gradient
from profiles.model.profile import Numerics
from profiles.model.work import GROUPED_ALIGNMENT
from profiles.trace.scopes import Grouped


def mixtral(fields: Fields) -> ModelFamily:
    """Every layer a mixture; the weights of the chosen experts add up to one, in fp32."""
    fields.only("output_router_logits", False, None)
    fields.only("router_jitter_noise", 0, 0.0, None)
    fields.require("num_local_experts")
    count = fields.size("num_local_experts")
    chosen = fields.size("num_experts_per_tok", 2)

    def feed_forward(unit: FamilyUnit, shape: LlamaVariant, layer: int, hidden: Array) -> Array:
        rows = ops.reshape(hidden, -1, hidden.shape[-1])
        with unit.module("Router"):
            logits = kernels.linear(rows, unit.parameter("mlp.gate.weight", count, shape.hidden))
            scores = ops.softmax(ops.cast(logits, DType.FLOAT32))
            weights, indices = top(scores, chosen)
            weights = ops.div(weights, ops.sum_over(weights, -1, keep=True), in_place=True)
        rows = experts(unit, shape, rows, indices, weights, count=count, inner=shape.inner)
        return ops.reshape(rows, *hidden.shape)

    family = llama.decoder(fields, feed_forward, lambda layer: "mixture")
    return replace(family, experts_per_token=chosen)


def qwen3_moe(fields: Fields) -> ModelFamily:
    """Every `decoder_sparse_step`-th layer a mixture, those of `mlp_only_layers` dense."""
    fields.only("output_router_logits", False, None)
    fields.require("num_experts", "moe_intermediate_size")
    count = fields.size("num_experts")
    chosen = fields.size("num_experts_per_tok", 8)
    inner = fields.size("moe_intermediate_size")
    step = fields.size("decoder_sparse_step", 1)
    dense = fields.numbers("mlp_only_layers")
    is_normalised = fields.flag("norm_topk_prob", False)

    def is_mixture(layer: int) -> bool:
        return layer not in dense and (layer + 1) % step == 0

    def feed_forward(unit: FamilyUnit, shape: LlamaVariant, layer: int, hidden: Array) -> Array:
        if not is_mixture(layer):
            return llama.gated(unit, shape, layer, hidden)
        rows = ops.reshape(hidden, -1, hidden.shape[-1])
        with unit.module("Router"):
            logits = kernels.linear(rows, unit.parameter("mlp.gate.weight", count, shape.hidden))
            scores = ops.softmax(logits, dtype=DType.FLOAT32)
            weights, indices = top(scores, chosen)
            if is_normalised:
                weights = ops.div(weights, ops.sum_over(weights, -1, keep=True), in_place=True)
            weights = ops.cast(weights, logits.dtype)
        rows = experts(unit, shape, rows, indices, weights, count=count, inner=inner)
        return ops.reshape(rows, *hidden.shape)

    family = llama.decoder(fields, feed_forward, is_mixture)
    return replace(family, experts_per_token=chosen)


def top(scores: Array, count: int) -> tuple[Array, Array]:
    """The `count` best along the last dimension, and which they are."""
    tape, before = scores.tape, scores.shape
    values = tape.empty((*before[:-1], count), scores.dtype)
    indices = tape.empty((*before[:-1], count), DType.INT64)
    tape.launch([scores], [values, indices], fusing=ALONE)
    tape.record([values], [scores], _scattered(tape.save(indices), scores))
    return values, indices


def experts(
    unit: FamilyUnit,
    shape: LlamaVariant,
    rows: Array,
    indices: Array,
    weights: Array,
    *,
    count: int,
    inner: int,
) -> Array:
    """Rows sorted by expert, two grouped products over all experts, and back in order."""
    chosen = indices.shape[1]
    weights, indices = ops.reshape(weights, -1), ops.reshape(indices, -1)
    pairs, hidden = indices.shape[0], rows.shape[1]
    tape = rows.tape
    expert = tape.empty((pairs,), DType.INT64)
    order = tape.empty((pairs,), DType.INT64)
    tape.launch([indices], [expert, order], fusing=ALONE)
    picked = _rows(rows, order.tape.run([order], (pairs,), DType.INT64))
    sorted_weights = _rows(weights, order)
    numbers = ops.cast(expert, DType.FLOAT32)
    counts = expert.tape.run([numbers], (count,), DType.FLOAT32, fusing=ALONE)
    ends = counts.tape.run([counts], (count,), DType.INT32, fusing=ALONE)
    up = unit.parameter("mlp.experts.gate_up_proj", count, 2 * inner, shape.hidden)
    gate, value = ops.split(_grouped(picked, up, ends), [inner, inner])
    out = ops.mul(activate(gate, shape.activation), value)
    down = unit.parameter("mlp.experts.down_proj", count, shape.hidden, inner)
    out = _grouped(out, down, ends)
    weighted = ops.mul(out, ops.reshape(sorted_weights, -1, 1))
    back = _inverse(order)
    weighted = _rows(weighted, back)
    summed = ops.sum_over(ops.reshape(weighted, -1, chosen, hidden), 1)
    return ops.cast(summed, rows.dtype)


def gathered(table: Array, index: Array, shape: Shape, *, by_index: bool = True) -> Array:
    """Entries of a table that `index` asks for, in this shape; else by `gather`."""
    index = table.tape.save(index)
    out = table.tape.empty(shape, table.dtype)
    kernel = "" if by_index else "gather"
    table.tape.launch([table, index], [out], gathers=True, kernel=kernel, fusing=GATHER)
    back = _scattered(index, table, kernel="" if by_index else "scatter_add")
    table.tape.record([out], [table], back)
    return out


def _rows(table: Array, index: Array) -> Array:
    return gathered(table, index, (*index.shape, *table.shape[1:]))


def _scattered(
    index: Array, table: Array, *, kernel: str = ""
) -> Callable[[Array], list[Gradient]]:
    """Backward that adds up gradients into a table of zeros."""
    shape, dtype = table.shape, table.dtype

    def backward(g: Array) -> list[Gradient]:
        zeros = g.tape.run([g], shape, dtype)
        return [g.tape.run([zeros, index, g], shape, dtype, kernel=kernel, fusing=ALONE)]

    return backward


def _inverse(order: Array) -> Array:
    """Inverse permutation of the pairs."""
    out = order.tape.empty(order.shape, DType.INT64)
    counted = order.tape.run([], order.shape, DType.INT64)
    order.tape.launch([out, order, counted], [out], fusing=ALONE)
    return out


def _grouped(rows: Array, weight: Array, ends: Array) -> Array:
    """Rows (M, K) of several experts by their weights (G, N, K): (M, N) in one kernel.

    transformers brings rows to the dtype of the weights; under autocast both are then cast as
    `profiles.torch_compat.grouped` does.
    """
    tape, weight = rows.tape, ops.transpose(weight, 1, 2)
    wide, narrow = weight.shape[2], weight.shape[1]
    rows = ops.cast(rows, weight.dtype)
    is_lowered = tape.numerics is Numerics.BF16_AUTOCAST
    if is_lowered and wide % GROUPED_ALIGNMENT == narrow % GROUPED_ALIGNMENT == 0:
        rows, weight = ops.cast(rows, DType.BFLOAT16), ops.cast(weight, DType.BFLOAT16)
    dtype = rows.dtype
    flop = 2 * rows.shape[0] * narrow * wide
    saved_rows, saved_weight, ends = tape.save(rows), tape.save(weight), tape.save(ends)
    out = tape.empty((rows.shape[0], wide), dtype)
    tape.launch([rows, weight, ends], [out], flop=flop, is_kept=True)
    product = Grouped(rows.shape[0], weight.shape[0], wide, narrow, dtype.size_bytes)
    tape.noted(product)

    def backward(g: Array) -> list[Gradient]:
        for_weight = tape.empty(saved_weight.shape, dtype)
        tape.launch([saved_rows, g, ends], [for_weight], flop=flop)
        tape.noted(product)
        for_rows = tape.empty(saved_rows.shape, dtype)
        tape.launch([g, saved_weight, ends], [for_rows], flop=flop)
        tape.noted(product)
        return [for_rows, for_weight]

    tape.record([out], [rows, weight], backward)
    return out
