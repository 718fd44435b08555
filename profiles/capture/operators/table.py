"""Operators by name: whose outputs are kept, which run, and the FLOP and bytes of each call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from profiles.capture.operators.accelerators import drops_scores
from profiles.capture.operators.map_layouts import CHANNELS_LAST
from profiles.model.work import FusibleKind
from profiles.torch_compat import (
    Operator,
    aten_operators,
    is_mutable,
    memory_format_of,
    storage_of,
)
from profiles.trace.chains import Fusing
from profiles.trace.scopes import Attended, Convolved, Grouped, Normed, Noted, Scored

FlopFormula = Callable[..., int]

_FUSED_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"

# What selective recompute keeps: much work per byte of output. Matmuls and attention as in
# torchtitan's list (`_save_list` in its activation checkpointing), and convolutions likewise.
_KEPT = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "_grouped_mm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    _FUSED_ATTENTION,
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
# Memory is reserved and nothing is launched.
_ALLOCATES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
# The first tensor is a table of which only the rows asked for are read.
_GATHERS = ("embedding", "index", "index_select", "gather")
# Of the tensor in this place one element is read for each of the next one's: a target's score.
_PICKS = {
    **{"nll_loss_forward": 0, "nll_loss2d_forward": 0},
    **{"nll_loss_backward": 1, "nll_loss2d_backward": 1},
}
# Compilers run these in one kernel with their neighbours, as they do all pointwise operators.
_FUSIBLE = (
    *("mean", "sum", "amax", "var", "var_mean", "_softmax", "_safe_softmax", "_log_softmax"),
    *("_softmax_backward_data", "_log_softmax_backward_data"),
    *("native_layer_norm", "native_layer_norm_backward"),
    *("_fused_rms_norm", "_fused_rms_norm_backward"),
    *("native_dropout", "bernoulli_", "nll_loss_forward", "nll_loss_backward"),
    *("_to_copy", "copy_", "cat", "stack", "slice_backward", "select_backward", "constant_pad_nd"),
    *("fill_", "zero_", "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "full"),
    *("full_like", "scalar_tensor", "arange", "index", "index_select", "gather"),
    # Pointwise to a compiler, without torch's tag (2.13).
    *("new_ones", "tril", "triu", "floor_divide", "masked_fill_"),
    *("leaky_relu_backward", "elu_backward"),
)
_ACTIVATIONS = (
    *("relu", "gelu", "silu", "tanh", "sigmoid", "elu", "leaky_relu", "hardtanh", "mish"),
    *("softplus", "hardswish", "log_sigmoid_forward"),
)
_BATCH_NORMS = (
    *("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"),
    *("native_batch_norm_backward", "batch_norm_backward"),
)
# The first tensor is overwritten without being read.
_OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_")


def kept_operators() -> tuple[Operator, ...]:
    """Operators whose outputs selective recompute keeps; those that this torch has.

    Counted by `profiles.capture.capture`, kept by `engines.blocks.recompute`: one list for both.
    """
    return aten_operators(_KEPT)


def flop_formulas() -> dict[object, FlopFormula]:
    """FLOP of a call by operator: `formula(*args, **kwargs, out_val=result)`.

    torch's own, plus what it leaves out (2.13): attention and LSTMs on the CPU, grouped matmuls;
    and the groups of a convolution, which it leaves out for the gradient of the weight.
    """
    aten = torch.ops.aten
    missing: dict[object, FlopFormula] = {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention_flop,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flop,
        aten.mkldnn_rnn_layer: functools.partial(_lstm_flop, products=1),
        aten.mkldnn_rnn_layer_backward: functools.partial(_lstm_flop, products=2),
    }
    if hasattr(aten, "_grouped_mm"):
        missing[aten._grouped_mm] = _grouped_matmul_flop
    return missing | flop_registry | {aten.convolution_backward: _convolution_backward_flop}


def _convolution_backward_flop(
    gradient: Tensor, value: Tensor, weight: Tensor, *rest: Any, **_: object
) -> int:
    """Either gradient takes the multiply-adds of the forward: each element of the output, or of
    the input of a transposed one, meets those of a group's weights."""
    *_rest, is_transposed, _padding, _groups, (with_input, with_weight, _bias) = rest
    rows, met = value if is_transposed else gradient, math.prod(weight.shape[1:])
    return 2 * (int(with_input) + int(with_weight)) * rows.numel() * met


def _lstm_flop(
    value: Tensor, of_inputs: Tensor, of_states: Tensor, *_: object, products: int, **__: object
) -> int:
    """Products of all steps (steps, rows, width) with the weights; their gradients are two each."""
    return products * 2 * value.shape[0] * value.shape[1] * (of_inputs.numel() + of_states.numel())


def attended(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Attended | None:
    """The call of fused attention on a CPU that this is, forward or backward.

    The forward takes (query, key, value, dropout, is_causal), the backward (gradient, query, key,
    value, out, log of sums, dropout, is_causal).
    """
    name = operator.overloadpacket.__name__
    if not name.startswith(_FUSED_ATTENTION):
        return None
    is_backward = name != _FUSED_ATTENTION
    query, key, value = args[1:4] if is_backward else args[:3]
    position = 7 if is_backward else 4
    causal = args[position] if len(args) > position else kwargs.get("is_causal", False)
    return Attended(
        rows=query.shape[0],
        heads=query.shape[1],
        kv_heads=key.shape[1],
        queries=query.shape[2],
        keys=key.shape[2],
        width=query.shape[3],
        value_width=value.shape[3],
        is_causal=bool(causal),
        element_bytes=query.element_size(),
        dropout=drops_scores(),
    )


def noted(
    operator: Operator, args: Sequence[Any], outputs: Sequence[Tensor], *, on_processor: bool
) -> Noted | None:
    """Work whose time follows from the sizes that it is called with, if this is such.

    A processor's time rests on FLOP and bytes alone: there products of experts and norms are told
    apart.
    """
    name = operator.overloadpacket.__name__
    if name in _BATCH_NORMS:
        norm = normed(operator, args)
        return None if norm is not None and norm.is_by_rows and not on_processor else norm
    if name == "_grouped_mm" and len(args) > 2 and args[2] is not None:
        a, _, ends, *_ = args
        width = outputs[0].shape[-1]
        return Grouped(a.shape[-2], ends.shape[0], width, a.shape[-1], a.element_size())
    if on_processor:
        return None
    if name in ("bmm", "baddbmm"):
        a = args[0] if name == "bmm" else args[1]
        many, height, k = a.shape
        return Scored(many * height, height, outputs[0].shape[-1], k, a.element_size())
    if name in ("convolution", "convolution_backward"):
        return _convolved(args, outputs, is_backward=name != "convolution")
    return None


def _convolved(
    args: Sequence[Any], outputs: Sequence[Tensor], *, is_backward: bool
) -> Convolved | None:
    """A convolution, of which what a layer does itself is counted there.

    A transposed one multiplies each position of its input by the weights of all positions that it
    reaches, and sums where they meet.
    """
    written = args[0] if is_backward else outputs[0]
    value, weight = args[1:3] if is_backward else args[:2]
    *_, is_transposed, _padding, groups = args[:-1] if is_backward else args
    if not weight.numel() or not written.numel():
        return None
    positions = value if is_transposed else written
    rows = positions.numel() // positions.shape[1]
    n, k = weight.shape[0] // groups, math.prod(weight.shape[1:])
    n, k = (k, n) if is_transposed else (n, k)
    return Convolved(
        rows=rows,
        groups=groups,
        n=n,
        k=k,
        maps_per_row=(value.numel() + written.numel()) / rows,
        element_bytes=value.element_size(),
        needs_input_gradient=not is_backward or bool(args[-1][0]),
    )


def normed(operator: Operator, args: Sequence[Any]) -> Normed | None:
    """The batch norm that this is, or its backward, by statistics of the batch; one by running
    statistics, `training` false, is bound by memory."""
    name = operator.overloadpacket.__name__
    if name not in _BATCH_NORMS or len(args) < 2:
        return None
    if not next((flag for flag in args if isinstance(flag, bool)), True):  # the first is `training`
        return None
    value = args[1] if "backward" in name else args[0]
    is_by_rows = memory_format_of(value) in CHANNELS_LAST
    return Normed(value.numel(), value.shape[1], value.element_size(), is_by_rows)


def launches(operator: Operator, *, makes_storage: bool) -> bool:
    """True if a call runs a kernel. Views, reshapes without a copy and allocations do not."""
    if operator.overloadpacket.__name__ in _ALLOCATES:
        return False
    return makes_storage or is_mutable(operator)


def read_bytes(
    operator: Operator, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> list[int]:
    """Bytes of each input that one call reads in device memory, with nothing left in caches."""
    name = operator.overloadpacket.__name__
    read = [occupied_bytes(tensor) for tensor in inputs]
    if read and name in _OVERWRITES:
        read[0] = 0
    if read and name in _GATHERS:
        read[0] = min(read[0], sum(map(occupied_bytes, outputs)))
    if name in _PICKS:
        scores, targets = inputs[_PICKS[name] :][:2]
        picked = targets.numel() * scores.element_size()
        read[_PICKS[name]] = min(read[_PICKS[name]], picked)
    return read


def moved_bytes(operator: Operator, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Bytes that one call reads and writes in device memory, with nothing left in caches."""
    return sum(read_bytes(operator, inputs, outputs)) + sum(map(occupied_bytes, outputs))


@functools.cache
def fusing_of(operator: Operator) -> Fusing:
    """Of the operator, whatever it is called with."""
    name = operator.overloadpacket.__name__
    plain = name.removesuffix("_")
    hint = None
    if plain in _ACTIVATIONS:
        hint = FusibleKind.GATE
    elif name in _GATHERS:
        hint = FusibleKind.ROUTER
    return Fusing(
        is_fusible=torch.Tag.pointwise in operator.tags or name in _FUSIBLE,
        hint=hint,
        is_softmax=name in ("_softmax", "_safe_softmax"),
        is_attention=name in ("bmm", "baddbmm") or (name in _KEPT and "attention" in name),
        draws=torch.Tag.nondeterministic_seeded in operator.tags,
    )


def occupied_bytes(tensor: Tensor) -> int:
    """Memory behind a tensor's elements; an expanded tensor occupies what it was expanded from."""
    storage = storage_of(tensor)
    return 0 if storage is None else min(tensor.nbytes, storage.nbytes())


def grouped_matmul(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The result of `aten._grouped_mm` in shape and dtype alone.

    torch's own rule for fake tensors refuses float32 and unaligned rows, which CPUs multiply.
    (M, K) x (G, K, N) gives (M, N), (M, K) x (K, N) gives (G, M, N), (G, M, K) x (K, N) gives
    (M, N), and (G, M, K) x (G, K, N) is a batched matmul.
    """
    rows, columns = a.shape[-2], b.shape[-1]
    if a.ndim == b.ndim:
        assert a.ndim == 3 or offs is not None
        groups = a.shape[0] if offs is None else offs.shape[0]
        return a.new_empty((groups, rows, columns), dtype=out_dtype)
    return a.new_empty((rows, columns), dtype=out_dtype)


def _grouped_matmul_flop(a: Tensor, b: Tensor, *_: object, **__: object) -> int:
    # The groups share out the rows, the columns or the inner dimension, so their number cancels out
    # unless both operands have one matrix per group.
    groups = a.shape[0] if a.ndim == b.ndim == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _attention_flop(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    return int(sdpa_flop_count(query.shape, *_with_heads_of(query, key, value)))


def _attention_backward_flop(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
) -> int:
    key_shape, value_shape = _with_heads_of(query, key, value)
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, key_shape, value_shape))


def _with_heads_of(query: Tensor, key: Tensor, value: Tensor) -> tuple[torch.Size, torch.Size]:
    """Grouped queries share keys and values, and each is multiplied all the same; torch 2.11's
    formulas want as many of them as queries."""
    shapes = ((*query.shape[:-2], *tensor.shape[-2:]) for tensor in (key, value))
    key_shape, value_shape = map(torch.Size, shapes)
    return key_shape, value_shape
