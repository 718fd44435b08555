"""Charges of operators on accelerators beside their operands' bytes: see
`profiles.model.kernel_cycles`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from profiles.model.kernel_cycles import COPY, POINTWISE, SUM, Charge, Operand, charge
from profiles.torch_compat import Operator

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
    return charge(name, [*map(operand, inputs)], [*map(operand, outputs)], dim=dim)


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
