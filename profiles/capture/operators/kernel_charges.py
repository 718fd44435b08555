"""Charges of operators on accelerators beside their operands' bytes: see
`profiles.model.kernel_cycles`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from profiles.capture.operators.table import normed
from profiles.model.kernel_cycles import (
    COPY,
    NOTHING,
    POINTWISE,
    SUM,
    Charge,
    Operand,
    charge,
    convolution,
    depthwise,
)
from profiles.torch_compat import Operator

HALF_BYTES = 2
_FORTH, _BACK = "convolution", "convolution_backward"
_COPIES = ("copy_", "_to_copy", "clone")
# Elementwise without torch's tag (2.13).
_ELEMENTWISE = ("masked_fill_", "hardtanh_backward", "leaky_relu_backward", "elu_backward")
# Elementwise with a time of their own.
_OWN = ("gelu", "gelu_backward", "silu", "silu_backward")
# Where operators have the dimension of a softmax.
_DIM = {"_softmax": 1, "_log_softmax": 1, "_safe_softmax": 1}
_DIM |= {"_softmax_backward_data": 2, "_log_softmax_backward_data": 2}


def kernel_charge(
    operator: Operator, args: Sequence[Any], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> Charge:
    """Kernels, bytes and cycles of one call."""
    name = operator.overloadpacket.__name__
    if name in _COPIES:
        name, inputs = COPY, inputs[-1:]  # what `copy_` writes over is not read
    elif name == "sum":
        name = SUM if inputs and _keeps_last(args, inputs[0]) else ""
    elif (torch.Tag.pointwise in operator.tags and name not in _OWN) or name in _ELEMENTWISE:
        name = POINTWISE
    dim = args[_DIM[name]] if name in _DIM else -1
    own = charge(name, [*map(operand, inputs)], [*map(operand, outputs)], dim=dim)
    call = _convolution(operator, args, outputs)
    if call is None:
        return own.plus(_of_norm(operator, args))
    is_half = call.value.element_size() <= HALF_BYTES
    maps_bytes = _maps_bytes(call)
    besides = convolution(maps_bytes, gradients=call.gradients, is_half=is_half)
    return own.plus(besides).plus(_of_depthwise(call))


def operand(tensor: Tensor) -> Operand:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Operand(tuple(tensor.shape), tuple(tensor.stride()), dtype)


def _keeps_last(args: Sequence[Any], value: Tensor) -> bool:
    """True if a sum is not over the last dimension."""
    dims = args[1] if len(args) > 1 else None
    if not dims or not value.dim():
        return False
    dims = (dims,) if isinstance(dims, int) else dims
    return all(dim % value.dim() != value.dim() - 1 for dim in dims)


def _maps_bytes(call: _Convolution) -> int:
    """Bytes of the maps that a convolution on matrix units lays out anew. Most 1x1 convolutions,
    which are plain products, and maps that lie so already need none."""
    is_plain = set(call.weight.shape[2:]) == set(call.stride) == {1}
    if is_plain or _runs_depthwise(call) or _has_channels_last(call.value):
        return 0
    return int(call.value.nbytes + call.written.nbytes)


class _Convolution(NamedTuple):
    """The maps and the weight of a call, forward or backward; `gradients`: of its maps and weight
    in a backward, 1 in a forward."""

    value: Tensor
    weight: Tensor
    written: Tensor
    stride: Sequence[int]
    is_backward: bool
    gradients: int
    is_transposed: bool
    groups: int


def _convolution(
    operator: Operator, args: Sequence[Any], outputs: Sequence[Tensor]
) -> _Convolution | None:
    name = operator.overloadpacket.__name__
    if name not in (_FORTH, _BACK):
        return None
    is_backward = name == _BACK
    value, weight = args[1:3] if is_backward else args[:2]
    written = args[0] if is_backward else outputs[0]
    stride = args[4] if is_backward else args[3]
    *_, is_transposed, _padding, groups = args[:-1] if is_backward else args
    gradients = 1 + bool(args[-1][0]) if is_backward else 1
    return _Convolution(
        value, weight, written, stride, is_backward, gradients, is_transposed, groups
    )


def _of_norm(operator: Operator, args: Sequence[Any]) -> Charge:
    """Charge of a batch norm of maps in channels last, whose rows are shared by blocks of threads:
    they are read once more for their sums, and back once more with their gradients (2.11,
    `batch_norm_*_channels_last_kernel` in torch/aten/src/ATen/native/cuda/Normalization.cuh). Of
    other maps a block sums a channel, which takes longer: see `advisor.cost.compute.norms`."""
    norm = normed(operator, args)
    if norm is None or not norm.is_by_rows:
        return NOTHING
    again = 2 if "backward" in operator.overloadpacket.__name__ else 1
    return Charge(0, again * norm.rows * norm.element_bytes)


def _has_channels_last(value: Tensor) -> bool:
    return value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)


def _runs_depthwise(call: _Convolution) -> bool:
    """True where torch takes its own kernels: a group for each channel of maps that lie channel
    after channel (2.11, torch/aten/src/ATen/native/Convolution.cpp, `is_depthwise`,
    `use_cudnn_depthwise`)."""
    channels = call.value.shape[1] if call.value.dim() == 4 else 0
    is_own = 1 < channels == call.groups and not call.is_transposed
    return is_own and not _has_channels_last(call.value)


def _of_depthwise(call: _Convolution) -> Charge:
    if not _runs_depthwise(call) or not call.written.numel():
        return NOTHING
    products = call.written.numel() * math.prod(call.weight.shape[1:])
    per_output = call.value[0, 0].numel() / call.written[0, 0].numel()
    return depthwise(products, per_output, is_backward=call.is_backward)
