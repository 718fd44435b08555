"""T5: an encoder and a decoder that attends to it, with learned biases for relative positions."""

from __future__ import annotations

from dataclasses import dataclass

from profiles.closed_forms.families import operations as ops
from profiles.closed_forms.families.attention import attend, heads
from profiles.closed_forms.families.fields import Fields
from profiles.closed_forms.families.layers import ACTIVATIONS, activate, head, token_loss
from profiles.closed_forms.families.layouts import dense
from profiles.closed_forms.families.memory import DType
from profiles.closed_forms.families.network import FamilyRun, FamilyUnit, ModelFamily
from profiles.closed_forms.families.tape import Array, Gradient
from profiles.model.kernel_cycles import POINTWISE


@dataclass(frozen=True, slots=True)
class T5Sizes:
    """Sizes as in the config; `head` is the width of one, which need not divide `width`."""

    vocab: int
    width: int
    inner: int
    heads: int
    head: int
    buckets: int
    layers: int
    decoder_layers: int
    activation: str
    is_gated: bool
    dropout: float
    scales_output: bool


def family(fields: Fields) -> ModelFamily:
    """T5 and its later kinds (v1.1, FLAN), encoder and decoder on sequences of one length."""
    kind = fields.architecture("T5ForConditionalGeneration")
    fields.only("is_encoder_decoder", True, None)
    fields.require("vocab_size", "d_model", "d_ff", "num_layers", "num_heads")
    activation, is_gated = _feed_forward(fields)
    layers = fields.size("num_layers")
    shape = T5Sizes(
        vocab=fields.size("vocab_size"),
        width=fields.size("d_model"),
        inner=fields.size("d_ff"),
        heads=fields.size("num_heads"),
        head=fields.size("d_kv", 64),
        buckets=fields.size("relative_attention_num_buckets", 32),
        layers=layers,
        decoder_layers=fields.size("num_decoder_layers", layers),
        activation=activation,
        is_gated=is_gated,
        dropout=fields.share("dropout_rate", 0.1),
        scales_output=fields.flag("tie_word_embeddings", True),
    )
    return ModelFamily(kind, lambda network: _run(network, shape))


def _feed_forward(fields: Fields) -> tuple[str, bool]:
    """`feed_forward_proj`: "relu", or "gated-" and a function."""
    known = [*ACTIVATIONS, *(f"gated-{name}" for name in ACTIVATIONS)]
    written = fields.choice("feed_forward_proj", "relu", known)
    # transformers reads the name of T5 v1.1 so.
    name = "gelu_new" if written == "gated-gelu" else written.removeprefix("gated-")
    return name, written.startswith("gated-")


def _run(network: FamilyRun, shape: T5Sizes) -> tuple[Array, ...]:
    shared = network.unit("shared", "Embedding")
    words = shared.parameter("weight", shape.vocab, shape.width)
    encoded = _stack(network, shape, words, network.ids(), None)
    labels = network.ids()
    decoded = _stack(network, shape, words, _shifted(labels), encoded)
    scaled = ops.mul_number(decoded) if shape.scales_output else decoded
    logits = head(network, scaled, shape.vocab, shared)
    loss = token_loss(logits, labels)
    return loss, logits, encoded


def _stack(
    network: FamilyRun, shape: T5Sizes, words: Array, ids: Array, encoded: Array | None
) -> Array:
    """The encoder, or with what that gave the decoder."""
    name = "encoder" if encoded is None else "decoder"
    tokens = network.unit(f"{name}.embed_tokens", "Embedding")
    embedded = tokens(
        lambda unit, x: unit.embedding(x, "", shape.vocab, shape.width, tied=words), ids
    )
    drop = network.unit(f"{name}.dropout", "Dropout")
    hidden = drop(lambda unit, x: ops.dropout(x, shape.dropout), embedded)
    bias: Array | None = None
    cross_bias: Array | None = None
    count = shape.layers if encoded is None else shape.decoder_layers
    kinds = ["first", *["block"] * (count - 1)]  # the first makes the biases
    for layer in network.layers(f"{name}.block", kinds):
        block = network.unit(f"{name}.block.{layer}", "T5Block", is_block=True)
        if encoded is None:
            hidden, bias = block(_encoder_block, hidden, bias, shape=shape)
        else:
            hidden, bias, cross_bias = block(
                _decoder_block, hidden, bias, encoded, cross_bias, shape=shape
            )
    norm = network.unit(f"{name}.final_layer_norm", "T5LayerNorm")
    hidden = norm(lambda unit, x: _norm(unit, x, ""), hidden)
    return drop(lambda unit, x: ops.dropout(x, shape.dropout), hidden)


def _encoder_block(
    unit: FamilyUnit, hidden: Array, bias: Array | None, *, shape: T5Sizes
) -> tuple[Array, Array]:
    hidden, bias = _attended(unit, shape, hidden, None, bias, "layer.0")
    return _feed(unit, shape, hidden, "layer.1"), bias


def _decoder_block(
    unit: FamilyUnit,
    hidden: Array,
    bias: Array | None,
    encoded: Array,
    cross_bias: Array | None,
    *,
    shape: T5Sizes,
) -> tuple[Array, Array, Array]:
    hidden, bias = _attended(unit, shape, hidden, None, bias, "layer.0", is_causal=True)
    hidden, cross_bias = _attended(unit, shape, hidden, encoded, cross_bias, "layer.1")
    return _feed(unit, shape, hidden, "layer.2"), bias, cross_bias


def _attended(
    unit: FamilyUnit,
    shape: T5Sizes,
    hidden: Array,
    encoded: Array | None,
    bias: Array | None,
    path: str,
    *,
    is_causal: bool = False,
) -> tuple[Array, Array]:
    """Attention to itself, or to what was encoded, and the residual sum."""
    normed = _norm(unit, hidden, f"{path}.layer_norm")
    name = "SelfAttention" if encoded is None else "EncDecAttention"
    source = normed if encoded is None else encoded
    attended, bias = _attention(
        unit, shape, normed, source, bias, f"{path}.{name}", is_causal=is_causal
    )
    return ops.add(hidden, ops.dropout(attended, shape.dropout)), bias


def _feed(unit: FamilyUnit, shape: T5Sizes, hidden: Array, path: str) -> Array:
    normed = _norm(unit, hidden, f"{path}.layer_norm")
    out = _dense(unit, shape, normed, f"{path}.DenseReluDense")
    return ops.add(hidden, ops.dropout(out, shape.dropout))


def _dense(unit: FamilyUnit, shape: T5Sizes, x: Array, path: str) -> Array:
    if shape.is_gated:
        gate = activate(unit.linear(x, f"{path}.wi_0", shape.inner, bias=False), shape.activation)
        wide = ops.mul(gate, unit.linear(x, f"{path}.wi_1", shape.inner, bias=False))
    else:
        wide = activate(unit.linear(x, f"{path}.wi", shape.inner, bias=False), shape.activation)
    wide = ops.dropout(wide, shape.dropout)
    weight = unit.parameter(f"{path}.wo.weight", shape.width, shape.inner)
    wide = ops.cast(wide, weight.dtype)
    return unit.linear(wide, f"{path}.wo", shape.width, bias=False)


def _attention(
    unit: FamilyUnit,
    shape: T5Sizes,
    hidden: Array,
    source: Array,
    bias: Array | None,
    path: str,
    *,
    is_causal: bool = False,
) -> tuple[Array, Array]:
    """Attention of `hidden` to `source`; the bias is made by the first block and handed on."""
    total = shape.heads * shape.head
    query = heads(unit.linear(hidden, f"{path}.q", total, bias=False), shape.head)
    key = heads(unit.linear(source, f"{path}.k", total, bias=False), shape.head)
    value = heads(unit.linear(source, f"{path}.v", total, bias=False), shape.head)
    if bias is None:
        lengths = (hidden.shape[1], source.shape[1])
        if path.endswith("SelfAttention"):
            bias = _learned_bias(unit, shape, query, lengths, path, is_causal=is_causal)
        else:
            bias = query.tape.run([], (1, shape.heads, *lengths), query.dtype)
    mask = _causal(bias) if is_causal else bias
    out = attend(query, key, value, ops.contiguous_copy(mask), dropout=shape.dropout)
    return unit.linear(out, f"{path}.o", shape.width, bias=False), bias


def _learned_bias(
    unit: FamilyUnit,
    shape: T5Sizes,
    like: Array,
    lengths: tuple[int, int],
    path: str,
    *,
    is_causal: bool,
) -> Array:
    """(1, heads, queries, keys), looked up by the bucket that a distance falls in."""

    def numbers(*of: Array, dtype: DType = DType.INT64) -> Array:
        return like.tape.run(of, lengths, dtype)

    def scaled(x: Array) -> Array:
        return numbers(x, dtype=DType.FLOAT32)

    queries = like.tape.run([], (lengths[0], 1), DType.INT64)
    queries = like.tape.run([queries], (lengths[0], 1), DType.INT64)
    keys = like.tape.run([], (lengths[1],), DType.INT64)
    distance = numbers(keys, queries)
    if is_causal:
        side = None
        distance = numbers(numbers(distance, numbers(distance)))  # what lies ahead counts as none
    else:
        side = ops.cast(numbers(distance, dtype=DType.BOOL), DType.INT64)
        side = numbers(numbers(side))
        distance = numbers(distance)
    is_small = numbers(distance, dtype=DType.BOOL)
    log = scaled(scaled(ops.cast(distance, DType.FLOAT32)))
    large = numbers(ops.cast(scaled(scaled(log)), DType.INT64))
    del log
    large = numbers(large, numbers(large))
    bucket = numbers(is_small, distance, large)
    if side is None:
        bucket = numbers(bucket)
    else:
        side.tape.launch([side, bucket], [side])
        bucket = side
    values = unit.embedding(bucket, f"{path}.relative_attention_bias", shape.buckets, shape.heads)
    values = ops.transpose(ops.transpose(values, 0, 2), 1, 2)
    return ops.reshape(values, 1, *values.shape)


def _causal(bias: Array) -> Array:
    """A bias (1, heads, queries, keys), with the least number where a key comes later."""
    tape, shape = bias.tape, bias.shape
    queries = tape.run([], (shape[2], 1), DType.INT64)
    keys = tape.run([], (shape[3],), DType.INT64)
    seen = tape.run([queries, keys], shape[2:], DType.BOOL)
    least = tape.run([], (), bias.dtype)
    seen = tape.save(ops.reshape(seen, 1, 1, *shape[2:]))
    strides = dense(shape, bias.strides)
    out = tape.run([seen, bias, least], shape, bias.dtype, strides, kernel=POINTWISE)

    def backward(g: Array) -> list[Gradient]:
        zero = tape.run([], (), g.dtype)
        return [tape.run([seen, g, zero], shape, g.dtype, kernel=POINTWISE)]

    tape.record([out], [bias], backward)
    return out


def _norm(unit: FamilyUnit, x: Array, path: str) -> Array:
    """The norm of T5: only the variance is computed in fp32."""
    weight = unit.parameter(f"{path}.weight" if path else "weight", x.shape[-1])
    with unit.module("LayerNorm"):
        variance = ops.mean_last(ops.power(ops.cast(x, DType.FLOAT32)))
        x = ops.mul(x, ops.rsqrt(ops.add_number(variance)))
        if weight.dtype is DType.BFLOAT16:
            x = ops.cast(x, weight.dtype)
        return ops.mul(weight, x)


def _shifted(labels: Array) -> Array:
    """Decoder inputs: labels shifted right by one, a start token first, padding for ignored
    ones."""
    tape, dtype = labels.tape, labels.dtype
    batch, length = labels.shape
    out = labels.tape.run([labels], labels.shape, dtype)
    earlier = labels.tape.run([ops.narrow(labels, 1, length - 1)], (batch, length - 1), dtype)
    tape.launch([earlier], [ops.narrow(out, 1, length - 1)])
    del earlier
    tape.launch([tape.known((), dtype)], [ops.narrow(out, 1, 1)])
    tape.launch([out, labels.tape.run([out], labels.shape, DType.BOOL)], [out])
    return out
