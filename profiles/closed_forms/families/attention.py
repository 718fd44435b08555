"""Attention as transformers and torch run it on a CPU: masks, rotary positions, kernels.

The attention implementation is `sdpa`. torch has one fused CPU kernel; dropout, a mask that needs a
gradient, or values of another width than keys take the unfused path. Of these the kernels for
accelerators take dropout and other widths.
"""

from __future__ import annotations

from collections.abc import Sequence

from profiles.closed_forms.families import kernels
from profiles.closed_forms.families import operations as ops
from profiles.closed_forms.families.fusing import ALONE, ATTENTION
from profiles.closed_forms.families.layouts import dense
from profiles.closed_forms.families.memory import DType
from profiles.closed_forms.families.network import FamilyRun, FamilyUnit
from profiles.closed_forms.families.tape import Array
from profiles.model import attention_kernels
from profiles.model.kernel_cycles import POINTWISE
from profiles.trace.scopes import Attended

# Positions and masks


def positions(network: FamilyRun) -> Array:
    """0, 1, ... for one sequence: (1, length)."""
    tape, shape = network.tape, (network.length,)
    counted = tape.run([], shape, DType.INT64)
    return ops.reshape(tape.run([counted], shape, DType.INT64), 1, -1)


def look_for_packing(network: FamilyRun, position_ids: Array) -> None:
    """Before it makes any mask transformers asks where positions start over; here they do not."""
    tape, batch, length = network.tape, network.samples, network.length

    def integers(width: int, *of: Array) -> Array:
        return tape.run(of, (batch, width), DType.INT64)

    rows = ops.expand(position_ids, batch, length)
    padded = integers(length + 1, integers(1, ops.narrow(rows, 1, 1)), rows)
    shifted = ops.narrow(padded, 1, length)
    starts = tape.run([integers(length, shifted, shifted)], (batch, length), DType.BOOL)
    tape.run([starts], (batch, length), DType.INT64, fusing=ALONE)  # counted


def causal_mask(network: FamilyRun, position_ids: Array, *, window: int | None) -> Array | None:
    """Mask of the keys that a query sees, (samples, 1, length, length) of bool; None if all before
    it.

    The kernel leaves out later keys by itself. Only a sliding window of as many tokens as the
    sequence has, or fewer, takes a mask in memory, one for all samples.
    """
    look_for_packing(network, position_ids)
    length, tape = network.length, network.tape
    if window is None or window > length:
        return None

    def integers(*shape: int, of: Sequence[Array] = ()) -> Array:
        return tape.run(of, shape, DType.INT64)

    def pairs(*of: Array) -> Array:
        return tape.run(of, (1, 1, length, length), DType.BOOL)

    grid = [integers(network.samples), integers(1)]  # of samples, heads, queries and keys
    grid += [integers(length, of=[integers(length)]) for _ in range(2)]
    queries, keys = ops.reshape(grid[2], 1, 1, -1, 1), ops.reshape(grid[3], 1, 1, 1, -1)
    everywhere = tape.run([queries], (), DType.BOOL)
    seen = pairs(everywhere, pairs(keys, integers(*queries.shape, of=[queries])))
    seen = pairs(seen, pairs(keys, queries))
    return ops.expand(seen, network.samples, 1, length, length)


def additive(mask: Array, dtype: DType) -> Array:
    """A boolean mask as numbers to be added, which torch makes in every call."""
    tape = mask.tape
    zero, infinity = (tape.run([], (), dtype) for _ in range(2))
    return tape.run([mask, zero, infinity], mask.shape, dtype, kernel=POINTWISE)


# Rotary positions


def rotary_table(
    unit: FamilyUnit, hidden: Array, position_ids: Array, *, width: int
) -> tuple[Array, Array]:
    """Cosines and sines in `hidden`'s dtype, (1, length, width)."""
    frequencies = unit.buffer(width // 2)
    unit.buffer(width // 2)  # the frequencies before any scaling
    length = position_ids.shape[1]
    columns = ops.reshape(position_ids, 1, length, 1)
    angle = ops.mul(ops.cast(columns, DType.FLOAT32), frequencies)
    angles = ops.cat([angle, angle])
    cosine = ops.mul_number(ops.mul_number(angles))  # cos, then the scaling of attention
    sine = ops.mul_number(ops.mul_number(angles))
    return ops.cast(cosine, hidden.dtype), ops.cast(sine, hidden.dtype)


def rotate(x: Array, cosine: Array, sine: Array) -> Array:
    """Turn pairs of a head's (samples, heads, length, width) by its position."""
    cosine, sine = (ops.reshape(table, 1, *table.shape) for table in (cosine, sine))
    half = x.shape[-1] // 2
    straight = ops.mul(x, cosine)
    first, second = ops.narrow(x, -1, half), ops.narrow(x, -1, x.shape[-1] - half)
    return ops.add(straight, ops.mul(ops.cat([ops.mul_number(second), first]), sine))


def rotate_partly(x: Array, cosine: Array, sine: Array) -> Array:
    """Turn the first part of a head, as wide as the table, and put the rest beside it."""
    width = cosine.shape[-1]
    first, rest = ops.narrow(x, -1, width), ops.narrow(x, -1, x.shape[-1] - width)
    return ops.cat([rotate(first, cosine, sine), rest])


# Heads


def heads(x: Array, width: int) -> Array:
    """(samples, length, heads * width) to (samples, heads, length, width)."""
    return ops.transpose(ops.reshape(x, *x.shape[:-1], -1, width), 1, 2)


def repeated(x: Array, times: int) -> Array:
    """Each head of keys or values `times` over, for the queries that share it."""
    if times == 1:
        return x
    batch, count, length, width = x.shape
    expanded = ops.reshape(x, batch, count, 1, length, width)
    expanded = ops.expand(expanded, batch, count, times, length, width)
    return ops.reshape(expanded, batch, count * times, length, width)


def attend(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
    *,
    dropout: float = 0.0,
    is_causal: bool = False,
) -> Array:
    """Heads in (samples, heads, length, width), heads side by side out.

    Without a mask and with `is_causal` the kernel leaves out later keys by itself. Without a mask
    keys and values may have fewer heads, each for as many queries.
    """
    lower = query.tape.lowered
    bias = mask and lower(mask, ops.cast)
    lowered = [lower(x, ops.cast) for x in (value, key, query)][::-1]
    is_uneven = lowered[0].shape[-1] != lowered[2].shape[-1]
    is_beyond = query.tape.on_processor and (dropout or is_uneven)
    trained = mask if mask and mask.needs_gradient else None
    # Of accelerators' kernels one gives a dense mask its gradient.
    is_alone = trained and (query.tape.on_processor or trained.strides[-1] != 1)
    has_no_kernel = not query.tape.on_processor and _is_grouped_in_fp32(*lowered[:2])
    if is_beyond or is_alone or has_no_kernel:
        out = _unfused(lowered, bias, dropout, is_causal=is_causal)
    else:
        bias = additive(bias, lowered[0].dtype) if bias and bias.dtype is DType.BOOL else bias
        out = _fused(lowered, bias, trained, is_causal=is_causal, has_dropout=bool(dropout))
    out = ops.contiguous_copy(ops.transpose(out, 1, 2))
    return ops.reshape(out, *out.shape[:2], -1)


def _is_grouped_in_fp32(query: Array, key: Array) -> bool:
    """True for what no kernel of CUDA takes, by the release of torch."""
    is_grouped = query.shape[1] != key.shape[1]
    return is_grouped and query.dtype is DType.FLOAT32 and not attention_kernels.FP32_TAKES_GROUPS


def _fused(
    inputs: Sequence[Array],
    mask: Array | None,
    trained: Array | None = None,
    *,
    is_causal: bool,
    has_dropout: bool,
) -> Array:
    """2 matrix products forward, 5 backward, as `torch.utils.flop_counter` counts them.

    `trained`: the mask as it was given, if it has a gradient.
    """
    query, key, value = inputs
    tape = query.tape
    batch, count, length, width = query.shape
    both = 2 * batch * count * length * key.shape[2] * (width + value.shape[3])
    operands = [query, key, value, *([mask] if mask else [])]
    saved = [tape.save(x) for x in operands]
    shape = (*query.shape[:3], value.shape[3])
    out = tape.empty(shape, query.dtype, dense(shape, query.strides))
    weights = tape.empty((batch, count, length), DType.FLOAT32)
    tape.launch(operands, [out, weights], flop=both, is_kept=True, fusing=ATTENTION)
    call = Attended(
        rows=batch, heads=count, kv_heads=key.shape[1], queries=length, keys=key.shape[2],
        width=width, value_width=value.shape[3], is_causal=is_causal and mask is None,
        element_bytes=query.dtype.size_bytes, dropout=has_dropout,
    )  # fmt: skip
    tape.attended(call)
    saved += [tape.save(out), tape.save(weights)]

    def backward(gradient: Array) -> list[Array]:
        made = [_by_position(x) for x in saved[:3]]
        tape.launch([gradient, *saved], made, flop=5 * both // 2)
        tape.attended(call)
        if trained:
            made.append(tape.empty(trained.shape, trained.dtype))
        return made

    tape.record([out], [query, key, value, *([trained] if trained else [])], backward)
    return out


def _by_position(x: Array) -> Array:
    """A gradient as the kernel lays it out: heads of one position side by side."""
    _, count, length, width = x.shape
    strides = (count * length * width, width, count * width, 1)
    return x.tape.empty(x.shape, x.dtype, strides)


def _unfused(
    inputs: Sequence[Array], mask: Array | None, dropout: float, *, is_causal: bool
) -> Array:
    """Scores are made, kept and dropped out in memory, in fp32."""
    query, key, value = inputs
    dtype = query.dtype
    if mask and mask.dtype is DType.BOOL:
        mask = additive(mask, dtype)
    exact = [ops.cast(x, DType.FLOAT32) for x in inputs]
    scaled = ops.mul_number(exact[0])
    if mask is None and is_causal:
        size = (query.shape[2], key.shape[2])
        everywhere = query.tape.run([], size, DType.BOOL)
        mask = additive(query.tape.run([everywhere], size, DType.BOOL), DType.FLOAT32)
        del everywhere
    key, value = (repeated(x, query.shape[1] // x.shape[1]) for x in exact[1:])
    weights = kernels.batched(scaled, ops.mul_number(ops.transpose(key, 2, 3)))
    weights = ops.add(weights, mask) if mask else weights
    weights = ops.softmax(weights, is_safe=mask is not None)
    weights = ops.dropout(weights, dropout)
    handed_back = ops.cast(weights, dtype)  # and not used
    out = ops.cast(kernels.batched(weights, value), dtype)
    del handed_back
    return out
