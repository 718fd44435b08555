"""Strides of arrays, by torch's rules."""

from __future__ import annotations

Shape = tuple[int, ...]


def contiguous(shape: Shape) -> Shape:
    """The strides of a row-major array.

    >>> contiguous((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def fits(shape: Shape, strides: Shape, wanted: Shape) -> bool:
    """True if two layouts are the same; strides of dimensions of size 1 do not matter."""
    return strides == wanted or all(
        a == b for size, a, b in zip(shape, strides, wanted, strict=True) if size != 1
    )


def dense(shape: Shape, strides: Shape) -> Shape:
    """Strides of a new array whose dimensions lie in the same order: torch's element-wise rule.

    Dimensions go from the largest stride to the smallest; an expanded one stays where it is.

    >>> dense((2, 4, 16, 8), (512, 8, 32, 1))
    (512, 8, 32, 1)
    >>> dense((2, 16, 32), (16, 1, 0))
    (512, 32, 1)
    """
    order: list[int] = []  # innermost first
    for dim in reversed(range(len(shape))):
        position = len(order)
        for before in reversed(range(len(order))):
            inner = order[before]
            if 0 in (strides[inner], strides[dim]) or 1 in (shape[inner], shape[dim]):
                continue
            if strides[dim] >= strides[inner]:
                break
            position = before
        order.insert(position, dim)
    packed, step = [0] * len(shape), 1
    for dim in order:
        packed[dim] = step
        step *= shape[dim]
    return tuple(packed)


def viewed(shape: Shape, strides: Shape, wanted: Shape) -> Shape | None:
    """Strides of the same memory seen in another shape; None where that takes a copy.

    >>> viewed((2, 16, 32), (512, 32, 1), (2, 16, 4, 8))
    (512, 32, 8, 1)
    >>> viewed((2, 16, 4, 8), (512, 8, 128, 1), (2, 16, 32)) is None
    True
    """
    new_strides = [1] * len(wanted)
    at = len(wanted) - 1
    base, size, filled = strides[-1] if strides else 1, 1, 1
    for dim in reversed(range(len(shape))):
        size *= shape[dim]
        if dim and (shape[dim - 1] == 1 or strides[dim - 1] == size * base):
            continue
        while at >= 0 and (filled < size or wanted[at] == 1):
            new_strides[at] = filled * base
            filled *= wanted[at]
            at -= 1
        if filled != size:
            return None
        if dim:
            base, size, filled = strides[dim - 1], 1, 1
    return tuple(new_strides) if at == -1 else None
