"""Charges of operators on accelerators beside their operands' bytes: see
`profiles.model.kernel_cycles`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from profiles.model.kernel_cycles import COPY, POINTWISE, SUM, Charge, Operand, charge, turned
from profiles.torch_compat import Operator

HALF_BYTES = 2
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
    is_half = bool(outputs) and outputs[0].element_size() <= HALF_BYTES
    return own.plus(turned(_turned_bytes(operator, args, outputs))) if is_half else own


def turned_in_fp32(operator: Operator, args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    """Bytes that a convolution in fp32 moves besides where it runs in TF32, and no others."""
    is_half = bool(outputs) and outputs[0].element_size() <= HALF_BYTES
    return 0 if is_half else _turned_bytes(operator, args, outputs)


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


def _turned_bytes(operator: Operator, args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    """Bytes that a convolution on matrix units reads and writes to lay the channels of a position
    side by side, and back: its maps, and in a backward both again for each of two gradients.

    By the kernels of a ResNet in 16 bits on an H200 (cuDNN 9): most 1x1 convolutions, which are
    plain products, and maps that lie so already need none.
    """
    name = operator.overloadpacket.__name__
    if name not in ("convolution", "convolution_backward"):
        return 0
    is_backward = name == "convolution_backward"
    value, weight = args[1:3] if is_backward else args[:2]
    written = args[0] if is_backward else outputs[0]
    stride = args[4] if is_backward else args[3]
    is_plain = set(weight.shape[2:]) == set(stride) == {1}
    lies_so = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
    if is_plain or lies_so:
        return 0
    gradients = 1 + bool(args[-1][0]) if is_backward else 1
    maps: int = value.nbytes + written.nbytes
    return 2 * gradients * maps
