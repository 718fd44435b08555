"""Kernels that torch has whole: norms, tables, losses and matrix products.

Each is one launch forward; what it saves, and what its backward launches, are torch's.
"""

from __future__ import annotations

import math

from profiles.closed_forms.families.fusing import ALONE, ATTENTION, GATHER
from profiles.closed_forms.families.layouts import contiguous, dense
from profiles.closed_forms.families.memory import DType
from profiles.closed_forms.families.operations import (
    cast,
    contiguous_copy,
    elementwise,
    reshape,
    transpose,
    widened,
)
from profiles.closed_forms.families.tape import Array, Gradient, Tape
from profiles.model.kernel_cycles import NOTHING, convolution
from profiles.model.profile import Numerics
from profiles.trace.scopes import Scored


def layer_norm(x: Array, weight: Array, bias: Array) -> Array:
    """torch's fused kernel; means and deviations are kept in fp32."""
    tape = x.tape
    x = contiguous_copy(widened(x))
    saved = [tape.save(x), tape.save(weight), tape.save(bias)]
    out = tape.empty(x.shape, x.dtype)
    moments = [tape.empty((*x.shape[:-1], 1), x.dtype) for _ in range(2)]
    tape.launch([x, weight, bias], [out, *moments], kernel="native_layer_norm")
    saved += [tape.save(moment) for moment in moments]

    def backward(g: Array) -> list[Gradient]:
        gradients = [tape.empty(array.shape, array.dtype) for array in saved[:3]]
        tape.launch([g, *saved], gradients, kernel="native_layer_norm_backward")
        return list(gradients)

    tape.record([out], [x, weight, bias], backward)
    return out


def embedding(weight: Array, ids: Array) -> Array:
    """Rows of a table; the gradient is a table again."""
    tape, shape = weight.tape, weight.shape
    ids = tape.save(ids)
    out = tape.empty((*ids.shape, shape[1]), weight.dtype)
    tape.launch([weight, ids], [out], gathers=True, fusing=GATHER._replace(is_fusible=False))
    options = {"fusing": ALONE, "kernel": "embedding_dense_backward"}
    tape.record([out], [weight], lambda g: [g.tape.run([g, ids], shape, g.dtype, **options)])
    return out


def cross_entropy(logits: Array, targets: Array) -> Array:
    """The mean over rows, of logits (rows, classes) and targets (rows,); in fp32 under autocast."""
    tape = logits.tape
    if tape.numerics is Numerics.BF16_AUTOCAST:
        logits = cast(logits, DType.FLOAT32)
    scores = logits.tape.run([logits], logits.shape, logits.dtype, kernel="_log_softmax")
    kept_scores, back = tape.save(scores), "_log_softmax_backward_data"
    tape.record([scores], [logits], lambda g: [elementwise(g, kept_scores, kernel=back)])
    scores_in, targets = tape.save(scores), tape.save(targets)
    loss, weight = tape.empty((), scores.dtype), tape.empty((), scores.dtype)
    tape.launch([_picked(scores, targets), targets], [loss, weight])
    weight = tape.save(weight)
    shape, dtype = scores.shape, scores.dtype

    def backward(g: Array) -> list[Gradient]:
        read = [g, _picked(scores_in, targets), targets, weight]
        return [g.tape.run(read, shape, dtype)]

    tape.record([loss], [scores], backward)
    return loss


def _picked(scores: Array, targets: Array) -> Array:
    """Of the scores, one for each target."""
    strides = contiguous(targets.shape)
    return Array(scores.tape, targets.shape, strides, scores.dtype, scores.storage)


# Matrix products


def mm(a: Array, b: Array, bias: Array | None = None) -> Array:
    """(M, K) x (K, N), with a bias in the same kernel."""
    tape, flop = a.tape, 2 * a.shape[0] * a.shape[1] * b.shape[1]
    a_shape, b_shape, dtype = a.shape, b.shape, a.dtype
    like_a, like_b = dense(a.shape, a.strides), dense(b.shape, b.strides)
    saved_a = tape.save(a) if b.needs_gradient else None
    saved_b = tape.save(b) if a.needs_gradient else None
    out = tape.empty((a_shape[0], b_shape[1]), dtype)
    operands = [a, b] if bias is None else [bias, a, b]
    tape.launch(operands, [out], flop=flop, is_kept=True)

    def backward(g: Array) -> list[Gradient]:
        def for_a() -> Gradient:
            return saved_b and g.tape.run([g, saved_b], a_shape, dtype, like_a, flop=flop)

        def for_b() -> Gradient:
            return saved_a and g.tape.run([saved_a, g], b_shape, dtype, like_b, flop=flop)

        if bias_shape is None:
            second, first = for_b(), for_a()
            return [first, second]
        return [g, for_a(), for_b()]

    bias_shape = None if bias is None else bias.shape
    tape.record([out], operands, backward)
    return out


def bmm(a: Array, b: Array) -> Array:
    """(B, M, K) x (B, K, N)."""
    tape, flop = a.tape, 2 * math.prod(a.shape) * b.shape[2]
    a_shape, b_shape, dtype = a.shape, b.shape, a.dtype
    saved_b = tape.save(b) if a.needs_gradient else None
    saved_a = tape.save(a) if b.needs_gradient else None
    out = tape.empty((*a_shape[:2], b_shape[2]), dtype)
    tape.launch([a, b], [out], flop=flop, is_kept=True, fusing=ATTENTION)
    batch, rows, k = a_shape
    _note_scores(tape, batch, rows, b_shape[2], k, dtype)

    def backward(g: Array) -> list[Gradient]:
        for_b = saved_a and saved_a.tape.run([saved_a, g], b_shape, dtype, flop=flop)
        if for_b:
            _note_scores(tape, batch, k, b_shape[2], rows, dtype)
        for_a = saved_b and g.tape.run([g, saved_b], a_shape, dtype, flop=flop)
        if for_a:
            _note_scores(tape, batch, rows, k, b_shape[2], dtype)
        return [for_a, for_b]

    tape.record([out], [a, b], backward)
    return out


def _note_scores(tape: Tape, batch: int, height: int, n: int, k: int, dtype: DType) -> None:
    if not tape.on_processor:
        tape.noted(Scored(batch * height, height, n, k, dtype.size_bytes))


def batched(a: Array, b: Array) -> Array:
    """A matrix product over all leading dimensions, which are equal."""
    leading = a.shape[:-2]
    flat = bmm(reshape(a, -1, *a.shape[-2:]), reshape(b, -1, *b.shape[-2:]))
    return reshape(flat, *leading, *flat.shape[1:])


def linear(
    x: Array, weight: Array, bias: Array | None = None, *, is_transposed: bool = False
) -> Array:
    """x (..., in) by weight (out, in); `is_transposed`: weight (in, out), as `addmm` takes it."""
    lower = x.tape.lowered
    # Autocast takes the last argument first: of linear(x, weight, bias), of addmm(bias, x, weight).
    if not is_transposed:
        bias = bias and lower(bias, cast)
    weight, x = lower(weight, cast), lower(x, cast)
    bias = bias and lower(bias, cast)
    weight = weight if is_transposed else transpose(weight, 0, 1)
    out = mm(reshape(x, -1, x.shape[-1]), weight, bias)
    return reshape(out, *x.shape[:-1], out.shape[-1])


def patches(images: Array, weight: Array, bias: Array) -> Array:
    """nn.Conv2d whose stride is its kernel: (B, C, H, W) by (N, C, k, k) to (B, N, H/k, W/k).

    Images need no gradient.
    """
    tape = images.tape
    bias, weight, images = (tape.lowered(x, cast) for x in (bias, weight, images))
    width, _, height, side = weight.shape
    saved = [tape.save(images), tape.save(weight)]
    shape = (images.shape[0], width, images.shape[2] // height, images.shape[3] // side)
    flop = 2 * math.prod(shape) * math.prod(weight.shape[1:])
    out = tape.empty(shape, images.dtype)
    maps_bytes, is_half = images.size_bytes + out.size_bytes, out.dtype is not DType.FLOAT32
    extra = NOTHING if tape.on_processor else convolution(maps_bytes, is_half=is_half)
    tape.launch([images, weight, bias], [out], flop=flop, is_kept=True, extra=extra)
    bias_shape, dtype = bias.shape, bias.dtype

    def backward(g: Array) -> list[Gradient]:
        for_weight, for_bias = tape.empty(weight_shape, dtype), tape.empty(bias_shape, dtype)
        tape.launch([g, *saved], [for_weight, for_bias], flop=flop, extra=extra)
        return [for_weight, for_bias]

    weight_shape = weight.shape
    tape.record([out], [weight, bias], backward)
    return out
