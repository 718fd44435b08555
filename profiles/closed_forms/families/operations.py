"""Operations as torch runs them: what each launches, saves, and does in its backward.

Named as in torch; formulas of gradients, and which operands are saved, are those of torch's
`derivatives.yaml`. Where a gradient of several operands takes several kernels, they run in the
order in which torch's generated code runs them. In C++ temporaries live to the end of the
expression, so here they have names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from profiles.closed_forms.families.fusing import ACTIVATION, DRAW, FUSIBLE, SOFTMAX
from profiles.closed_forms.families.layouts import Shape, contiguous, dense, viewed
from profiles.closed_forms.families.memory import DType
from profiles.closed_forms.families.tape import Array, Gradient
from profiles.model.kernel_cycles import COPY, POINTWISE, SUM
from profiles.model.profile import Numerics
from profiles.trace.chains import Fusing

# Views: nothing is launched


def reshape(x: Array, *shape: int) -> Array:
    """The elements in another shape, -1 for what is left; copied where the layout asks for it."""
    if -1 in shape:
        rest = x.elements // -math.prod(shape)
        shape = tuple(rest if size == -1 else size for size in shape)
    strides = viewed(x.shape, x.strides, shape)
    if strides is None:
        return reshape(contiguous_copy(x), *shape)
    before = x.shape
    return _view(x, shape, strides, lambda g: [reshape(g, *before)])


def transpose(x: Array, first: int, second: int) -> Array:
    order = list(range(len(x.shape)))
    order[first], order[second] = order[second], order[first]
    return permute(x, *order)


def permute(x: Array, *order: int) -> Array:
    back = sorted(range(len(order)), key=order.__getitem__)
    return _view(
        x,
        tuple(x.shape[dim] for dim in order),
        tuple(x.strides[dim] for dim in order),
        lambda g: [permute(g, *back)],
    )


def expand(x: Array, *shape: int) -> Array:
    """Repeat dimensions of size 1 without a copy; new ones come first."""
    new = len(shape) - len(x.shape)
    strides = (0,) * new + tuple(
        0 if size == 1 != wanted else stride
        for size, wanted, stride in zip(x.shape, shape[new:], x.strides, strict=True)
    )
    return _view(x, shape, strides, lambda g: [g])


def narrow(x: Array, dim: int, size: int) -> Array:
    """A part of `size` along a dimension, as by slicing."""
    if size == x.shape[dim]:
        return x
    dim %= len(x.shape)
    before = x.shape
    shape = (*before[:dim], size, *before[dim + 1 :])
    return _view(x, shape, x.strides, lambda g: [g.tape.run([g], before, g.dtype)])


def every_second(x: Array) -> Array:
    """Every other element of the last dimension, as by slicing with a step of 2."""
    before = x.shape
    shape, strides = (*before[:-1], before[-1] // 2), (*x.strides[:-1], 2 * x.strides[-1])
    return _view(x, shape, strides, lambda g: [g.tape.run([g], before, g.dtype)])


def split(x: Array, sizes: Sequence[int], dim: int = -1) -> list[Array]:
    """Parts along a dimension; their gradients are put together by one kernel."""
    dim %= len(x.shape)
    parts = [
        Array(x.tape, (*x.shape[:dim], size, *x.shape[dim + 1 :]), x.strides, x.dtype, x.storage)
        for size in sizes
    ]
    tape, shape, dtype = x.tape, x.shape, x.dtype

    def backward(*gradients: Gradient) -> list[Gradient]:
        made = [
            g if g is not None else tape.run([], part, dtype)
            for g, part in zip(gradients, shapes, strict=True)
        ]
        return [tape.run(made, shape, dtype, kernel="cat")]

    shapes = [part.shape for part in parts]
    x.tape.record(parts, [x], backward)
    return parts


def unbind(x: Array) -> list[Array]:
    """The parts along the first dimension, without it; their gradients are stacked."""
    count, *shape = x.shape
    parts = [Array(x.tape, tuple(shape), x.strides[1:], x.dtype, x.storage) for _ in range(count)]
    tape, whole, dtype = x.tape, x.shape, x.dtype
    tape.record(parts, [x], lambda *g: [tape.run(g, whole, dtype, kernel="stack")])
    return parts


def _view(
    x: Array, shape: Shape, strides: Shape, backward: Callable[[Array], list[Gradient]]
) -> Array:
    out = Array(x.tape, shape, strides, x.dtype, x.storage)
    x.tape.record([out], [x], backward)
    return out


# Copies and casts


def contiguous_copy(x: Array) -> Array:
    """`x` in row-major layout; itself if it is."""
    if x.is_contiguous:
        return x
    out = x.tape.run([x], x.shape, x.dtype, kernel=COPY)
    x.tape.record([out], [x], lambda g: [g])
    return out


def cast(x: Array, dtype: DType) -> Array:
    """`x` in another dtype; itself if it has it. A cast of a parameter is one under autocast."""
    if x.dtype is dtype:
        return x
    tape, before = x.tape, x.dtype
    holders = x.storage.made.holders
    if holders and tape.numerics is Numerics.BF16_AUTOCAST:
        out = tape.known(x.shape, dtype, holders=holders)
        out.strides = dense(x.shape, x.strides)
        tape.launch([x], [out], kernel=COPY)
    else:
        out = x.tape.run([x], x.shape, dtype, dense(x.shape, x.strides), kernel=COPY)
    tape.record([out], [x], lambda g: [cast(g, before)])
    return out


def widened(x: Array) -> Array:
    """`x` as autocast gives it to what it leaves in fp32 on accelerators, and not on processors."""
    is_widened = x.tape.numerics is Numerics.BF16_AUTOCAST and not x.tape.on_processor
    return cast(x, DType.FLOAT32) if is_widened and x.dtype is DType.BFLOAT16 else x


def cat(parts: Sequence[Array], dim: int = -1) -> Array:
    """Parts side by side; autocast brings them to one dtype, each by a kernel of its own."""
    dim %= len(parts[0].shape)
    parts = [cast(part, _promoted(parts)) for part in parts]
    sizes = [part.shape[dim] for part in parts]
    first = parts[0]
    shape = (*first.shape[:dim], sum(sizes), *first.shape[dim + 1 :])
    out = first.tape.run(parts, shape, first.dtype, kernel="cat")
    out.tape.record([out], parts, lambda g: [narrow(g, dim, size) for size in sizes])
    return out


def filled(parts: Sequence[Array], dtype: DType) -> Array:
    """Parts side by side, each copied into its place of one new array.

    In the backward every copy takes a whole copy of the gradient, from which it cuts its part and
    in which it leaves zeros where something was written over.
    """
    tape, (*before, _) = parts[0].tape, parts[0].shape
    shape = (*before, sum(part.shape[-1] for part in parts))
    whole = tape.empty(shape, dtype)
    for position, part in enumerate(parts):
        hole = Array(tape, part.shape, whole.strides, dtype, whole.storage)
        tape.launch([part], [hole], kernel=COPY)
        written, whole = whole, Array(tape, shape, whole.strides, dtype, whole.storage)
        tape.record([whole], [written, part], _cut(part.shape, position > 0))
    return whole


def _cut(part: Shape, is_over: bool) -> Callable[[Array], list[Gradient]]:
    def backward(g: Array) -> list[Gradient]:
        tape = g.tape
        rest = tape.run([g], g.shape, g.dtype, kernel=COPY)
        hole = Array(tape, part, rest.strides, g.dtype, rest.storage)
        cut = tape.run([hole], part, g.dtype, kernel=COPY)
        if is_over:
            zeros = tape.run([cut], part, g.dtype)
            tape.launch([zeros], [hole], kernel=COPY)
        return [rest if is_over else None, cut]

    return backward


# Element by element


def add(a: Array, b: Array) -> Array:
    out = elementwise(a, b)
    a.tape.record([out], [a, b], lambda g: [g, g])
    return out


def sub(a: Array, b: Array) -> Array:
    out = elementwise(a, b)
    a.tape.record([out], [a, b], lambda g: [g, elementwise(g)])
    return out


def add_number(x: Array) -> Array:
    out = elementwise(x)
    x.tape.record([out], [x], lambda g: [g])
    return out


def mul(a: Array, b: Array) -> Array:
    tape = a.tape
    saved_a = tape.save(a) if b.needs_gradient else None
    saved_b = tape.save(b) if a.needs_gradient else None
    out = elementwise(a, b)

    def backward(g: Array) -> list[Gradient]:
        for_b = None if saved_a is None else elementwise(g, saved_a)
        for_a = None if saved_b is None else elementwise(g, saved_b)
        return [for_a, for_b]

    tape.record([out], [a, b], backward)
    return out


def mul_number(x: Array) -> Array:
    """Times a number; -1 negates."""
    out = elementwise(x)
    x.tape.record([out], [x], lambda g: [elementwise(g)])
    return out


def div(a: Array, b: Array, *, in_place: bool = False) -> Array:
    """`in_place` writes over `a`, of which a copy is kept for the gradient of `b`."""
    tape = a.tape
    saved_b = tape.save(b)
    saved_a = tape.save(_copy(a) if in_place else a)
    if in_place:
        out = a.detached()
        tape.launch([a, b], [out], kernel=POINTWISE)
    else:
        out = elementwise(a, b)

    def backward(g: Array) -> list[Gradient]:
        quotient = elementwise(saved_a, saved_b)
        slope = elementwise(quotient, saved_b)
        opposite = elementwise(g)
        for_b = elementwise(opposite, slope)
        return [elementwise(g, saved_b), for_b]

    tape.record([out], [a, b], backward)
    return out


def power(x: Array) -> Array:
    """To a fixed exponent; in fp32 under autocast on accelerators."""
    x = widened(x)
    saved = x.tape.save(x)
    out = elementwise(x)

    def backward(g: Array) -> list[Gradient]:
        lower = elementwise(saved)
        slope = elementwise(lower)
        return [elementwise(g, slope)]

    x.tape.record([out], [x], backward)
    return out


def rsqrt(x: Array) -> Array:
    out = elementwise(x)
    saved = x.tape.save(out)

    def backward(g: Array) -> list[Gradient]:
        halved = elementwise(g)
        cube = elementwise(saved)
        return [elementwise(halved, cube)]

    x.tape.record([out], [x], backward)
    return out


def unary(x: Array) -> Array:
    """SiLU, GELU: one kernel forward, and one backward that reads the input."""
    saved = x.tape.save(x)
    out = elementwise(x, kernel="gelu", fusing=ACTIVATION)
    x.tape.record([out], [x], lambda g: [elementwise(g, saved, kernel="gelu_backward")])
    return out


def unary_by_result(x: Array) -> Array:
    """ReLU, tanh, sigmoid: the backward reads the output."""
    out = elementwise(x, fusing=ACTIVATION)
    saved = x.tape.save(out)
    x.tape.record([out], [x], lambda g: [elementwise(g, saved)])
    return out


def dropout(x: Array, probability: float) -> Array:
    """A mask of `x`'s dtype is drawn, scaled, kept, and multiplied; on accelerators one kernel
    draws a mask of bytes."""
    if not probability:
        return x
    tape = x.tape
    if not tape.on_processor:
        out = tape.empty(x.shape, x.dtype, dense(x.shape, x.strides))
        drawn = tape.empty(x.shape, DType.BOOL, dense(x.shape, x.strides))
        tape.launch([x], [out, drawn], kernel="native_dropout", fusing=DRAW)
        saved = tape.save(drawn)
        tape.record([out], [x], lambda g: [elementwise(g, saved)])
        return out
    mask = tape.empty(x.shape, x.dtype, dense(x.shape, x.strides))
    tape.launch([], [mask], fusing=DRAW)  # bernoulli_ overwrites
    tape.launch([mask], [mask])  # div_ by what is kept
    return mul(x, mask)


# Along a dimension


def mean_last(x: Array) -> Array:
    """Over the last dimension, which stays with size 1."""
    shape = x.shape
    out = x.tape.run([x], (*shape[:-1], 1), x.dtype)
    x.tape.record([out], [x], lambda g: [elementwise(expand(g, *shape))])
    return out


def sum_over(x: Array, dim: int, *, keep: bool = False) -> Array:
    before, dim = x.shape, dim % len(x.shape)
    with_one = (*before[:dim], 1, *before[dim + 1 :])
    out = x.tape.run([x], with_one, x.dtype, kernel=SUM if dim < len(before) - 1 else "")
    x.tape.record([out], [x], lambda g: [expand(g, *before)])
    return out if keep else reshape(out, *before[:dim], *before[dim + 1 :])


def softmax(x: Array, *, dtype: DType | None = None, is_safe: bool = False) -> Array:
    """Over the last dimension; with `dtype` torch casts first, in a kernel of its own.

    `is_safe`: rows of minus infinity give zeros.
    """
    x = widened(cast(x, dtype) if dtype else x)
    kernel, strides = "_safe_softmax" if is_safe else "_softmax", dense(x.shape, x.strides)
    out = x.tape.run([x], x.shape, x.dtype, strides, kernel=kernel, fusing=SOFTMAX)
    saved = x.tape.save(out)
    back = "_softmax_backward_data"
    x.tape.record([out], [x], lambda g: [elementwise(g, saved, kernel=back)])
    return out


# Shared


def adapt(gradient: Array, shape: Shape, dtype: DType) -> Array:
    """A gradient in the shape (summed over what was expanded) and dtype of its array."""
    if gradient.shape != shape:
        new = len(gradient.shape) - len(shape)
        with_ones = (1,) * new + shape
        if new or with_ones != gradient.shape:
            kernel = SUM if with_ones[-1] == gradient.shape[-1] else ""
            gradient = gradient.tape.run([gradient], with_ones, gradient.dtype, kernel=kernel)
        gradient = reshape(gradient, *shape)
    return cast(gradient, dtype)


def elementwise(*inputs: Array, kernel: str = POINTWISE, fusing: Fusing = FUSIBLE) -> Array:
    """One kernel over operands that are expanded to each other; laid out as the first whole one."""
    first = inputs[0]
    if all(array.shape == first.shape for array in inputs):
        shape, whole = first.shape, first
    else:
        shape = _broadcast([array.shape for array in inputs])
        whole = next((array for array in inputs if array.shape == shape), first)
    strides = dense(shape, whole.strides) if whole.shape == shape else contiguous(shape)
    dtype = _promoted(inputs)
    return first.tape.run(inputs, shape, dtype, strides, kernel=kernel, fusing=fusing)


def _copy(x: Array) -> Array:
    return x.tape.run([x], x.shape, x.dtype, dense(x.shape, x.strides), kernel=COPY)


def _broadcast(shapes: Sequence[Shape]) -> Shape:
    width = max(map(len, shapes))
    padded = [(1,) * (width - len(shape)) + shape for shape in shapes]
    return tuple(max(sizes) for sizes in zip(*padded, strict=True))


def _promoted(inputs: Sequence[Array]) -> DType:
    floating = [array.dtype for array in inputs if array.dtype.is_floating] or [inputs[0].dtype]
    return DType.FLOAT32 if DType.FLOAT32 in floating else floating[0]
