"""Cycles of an accelerator's multiprocessors for kernels that fall behind its memory.

torch's elementwise kernels take as long as their bytes where operands are of one dtype and lie
alike: they load vectors. With a cast, or with operands that are broadcast or strided, elements are
loaded one at a time. Norms and sums take a time for each row beside their bytes, and a softmax over
a dimension that is not the last one has a thread for each position.

Cycles are beyond those in which the bytes are moved, of torch 2.11 on an H200 (132 multiprocessors
of 1.98 GHz, 4.29 TB/s). They were read off traces of 17 models' steps, which are not kept; a kernel
of each kind is in `tests/profiles/model/test_kernel_cycles.py`, and `make gpu` times others alone
(elementwise).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

Shape = tuple[int, ...]

POINTWISE, COPY, SUM = "pointwise", "copy", "sum"
"""Kernels by what they do; others by the names of torch's operators. A sum keeps the last
dimension; others take no longer than their bytes."""
CAST, STRIDED, BOTH = 0.4, 0.5, 0.7
"""Of an element."""
_OF_ELEMENT = {
    **{"gelu": 0.1, "gelu_backward": 0.1, "silu": 0.1, "silu_backward": 0.1},
    **{"native_dropout": 0.17, "cat": 0.65, "stack": 0.9, "roll": 0.9},
    **{"max_pool2d_with_indices": 0.65, "max_pool2d_with_indices_backward": 2.2},
    **{"native_group_norm": 2.0, "native_group_norm_backward": 0.9},
    **{"gather": 0.2, "scatter_add": 1.9, "scatter_add_": 1.9},
}
_MANY = {"embedding_dense_backward": 7}
"""Kernels by what they take of the host: rows are sorted and counted by a library's, two dozen, in
0.3 ms (20 tables on an H200)."""
_OF_NORM = {"native_layer_norm": (300, 0.15), "native_layer_norm_backward": (500, 1.0)}
"""Of a row and of an element."""
_NARROW = 256
"""Elements of a row below which a norm's backward takes those of its elements alone."""
_OF_SOFTMAX = {
    **{"_softmax": (0.1, 0.5), "_safe_softmax": (0.4, 0.8), "_log_softmax": (0.1, 0.5)},
    **{"_softmax_backward_data": (0.0, 0.34), "_log_softmax_backward_data": (0.0, 0.34)},
}
"""Of an element: of rows that a kernel keeps on the chip, and of longer ones, read again."""
_KEPT_ROW = 2048
_OF_SUM = 450, 0.9
"""Of a row, and at most of an element: rows of a bias's gradient are added one after the other."""
_OF_CLASS = {name: 144_000 if "backward" in name else 309_000 for name in _OF_SOFTMAX}
"""Of each class of a softmax by positions that are fewer than threads: all wait for it."""
_THREADS = 132 * 2048
_TURNED, _TURNED_BYTES = 0.2, 4
"""Of an element of a map that is laid out anew, in 16 bits: read and written."""


_DEPTHWISE, _DEPTHWISE_INPUT, _DEPTHWISE_WEIGHT = 0.13, 0.22, 0.37
"""Of a multiply-add of torch's own depthwise kernels, beyond those of cuDNN's (layers of 5 x 5 in
rows of maps, 2.8 TFLOP/s forward and 1.1 for the gradient of the weight): forward, and back for
each place of the input and for the weight (`make gpu`, part b, depthwise kernels of torch)."""


class Operand(NamedTuple):
    """A tensor that a kernel reads or writes; `dtype` by torch's name."""

    shape: Shape
    strides: Shape
    dtype: str

    @property
    def elements(self) -> int:
        return prod(self.shape)


class Charge(NamedTuple):
    """Of one operator, beside its operands and results.

    Attributes:
        kernels: that it launches, by what they take of the host.
        moved_bytes, cycles: bytes that they move, and cycles beyond all bytes.
        turned_bytes: moved, beside `moved_bytes`, where maps are laid out anew around a convolution
            on matrix units: in 16 bits and TF32, unless their channels lie side by side already.
        turned_cycles: of `cycles`, those of such maps.
        casts: of `kernels`, those that change one floating dtype into another.
        workspace_bytes: taken while it runs.
    """

    kernels: int = 1
    moved_bytes: int = 0
    cycles: int = 0
    turned_bytes: int = 0
    turned_cycles: int = 0
    casts: int = 0
    workspace_bytes: int = 0

    def plus(self, other: Charge) -> Charge:
        return Charge(*(a + b for a, b in zip(self, other, strict=True)))


NOTHING = Charge(0)


def charge(
    name: str, inputs: Sequence[Operand], outputs: Sequence[Operand], *, dim: int = -1
) -> Charge:
    """Charge of an operator on an accelerator.

    A softmax's backward writes the product of gradient and result, and reads it again (torch 2.11,
    torch/aten/src/ATen/native/cuda/SoftMax.cu); one that is safe for rows without keys is followed
    by a comparison, its conjunction along rows, and a choice.

    Args:
        dim: of a softmax.
    """
    if not outputs or not _is_floating(outputs[0]):
        return Charge()
    element_bytes, elements = 4 if outputs[0].dtype == "float32" else 2, outputs[0].elements
    cycles = round(_cycles(name, inputs, outputs, dim))
    if name == "_softmax_backward_data":
        return Charge(2, 3 * elements * element_bytes, cycles)
    if name == "_safe_softmax":
        return Charge(4, elements * (3 * element_bytes + 2), cycles)
    casts = name == COPY and any(_is_cast(each, outputs[0]) for each in inputs)
    return Charge(_MANY.get(name, 1), 0, cycles, casts=int(casts))


def convolution(maps_bytes: int, *, gradients: int = 1, is_half: bool) -> Charge:
    """Charge of a convolution, forward or backward, beyond one kernel.

    cuDNN looks for its algorithm, and where matrix units run it lays the channels of a position
    side by side, and back: by the kernels of a ResNet on an H200 (cuDNN 9). Of small ones in a
    chain the host took 1.75 operations, 2.5 with a bias or in 16 bits; in steps of nine models
    nearer to the former. Memory within a tenth for 16 channels and more in bf16 and TF32; FFTs in
    exact fp32 take up to nine times as much (`make gpu`, part b, host work and workspaces).

    Args:
        maps_bytes: what it takes and what it gives; 0 where they lie so already.
        gradients: of a backward, each of which reads both maps.
    """
    moved = 2 * gradients * maps_bytes
    cycles = round(_TURNED * moved / _TURNED_BYTES) if is_half else 0
    return Charge(
        cycles=cycles, turned_bytes=moved, turned_cycles=cycles, workspace_bytes=maps_bytes
    )


def depthwise(products: int, per_output: float, *, is_backward: bool) -> Charge:
    """Charge of a convolution with a group for each channel, by torch's own kernels.

    Args:
        products: multiply-adds of the forward.
        per_output: places of the input for each of the output; the gradient of the input looks for
            outputs from every one of them.
    """
    back = _DEPTHWISE_INPUT * per_output + _DEPTHWISE_WEIGHT
    return Charge(0, 0, round(products * (back if is_backward else _DEPTHWISE)))


def _cycles(name: str, inputs: Sequence[Operand], outputs: Sequence[Operand], dim: int) -> float:
    out = outputs[0]
    largest = max(each.elements for each in (*inputs, *outputs))
    if name in (POINTWISE, COPY):
        return _of_elementwise(inputs, out, copies=name == COPY) * out.elements
    if name == SUM:
        of_row, most = _OF_SUM
        rows = inputs[0].elements / max(1, out.elements)
        return min(of_row * rows, most * inputs[0].elements)
    if name in _OF_NORM and inputs[0].elements:
        of_row, of_element = _OF_NORM[name]
        width = inputs[0].shape[-1]
        is_by_row = width >= _NARROW or not of_element
        return of_row * is_by_row * inputs[0].elements / width + of_element * largest
    if name in _OF_SOFTMAX and out.shape and out.elements:
        classes = out.shape[dim]
        if prod(out.shape[dim % len(out.shape) + 1 :]) > 1:
            return _OF_CLASS[name] * classes * max(1.0, out.elements / classes / _THREADS)
        return _OF_SOFTMAX[name][classes > _KEPT_ROW] * out.elements
    return _OF_ELEMENT.get(name, 0.0) * largest


def _of_elementwise(inputs: Sequence[Operand], out: Operand, *, copies: bool) -> float:
    """Cycles of an element; a copy from 32 bits to 16 loads vectors."""
    whole = [each for each in inputs if each.shape]  # numbers are arguments of the kernel
    dtypes = {each.dtype for each in (*whole, out) if copies or each.dtype != "bool"}
    is_cast = len(dtypes) > 1
    if copies and is_cast and whole and whole[0].dtype == "float32":
        is_cast = out.dtype not in ("bfloat16", "float16")
    is_strided = not _is_dense(out) or any(not _lies_like(each, out) for each in whole)
    if is_strided:
        return BOTH if is_cast else STRIDED
    return CAST if is_cast else 0.0


def _is_cast(before: Operand, after: Operand) -> bool:
    return before.dtype != after.dtype and _is_floating(before) and _is_floating(after)


def _is_floating(operand: Operand) -> bool:
    return operand.dtype in ("float32", "bfloat16", "float16", "float64")


def _is_dense(operand: Operand) -> bool:
    """True if the elements lie side by side, in whatever order of dimensions."""
    step = 1
    for stride, size in sorted(zip(operand.strides, operand.shape, strict=True)):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True


def _lies_like(operand: Operand, out: Operand) -> bool:
    return operand.shape == out.shape and all(
        a == b
        for size, a, b in zip(out.shape, operand.strides, out.strides, strict=True)
        if size != 1
    )
