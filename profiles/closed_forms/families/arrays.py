"""Arrays that have a shape, a layout and memory of a known size, and no values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from profiles.trace.scopes import LayerSegment, Scope
from profiles.trace.timeline import Timeline

if TYPE_CHECKING:
    from profiles.closed_forms.families.tape import Node, Tape

Shape = tuple[int, ...]


class DType(StrEnum):
    """The element types that appear in a training step, by torch's names."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT64 = "int64"
    INT32 = "int32"
    BOOL = "bool"

    @property
    def size_bytes(self) -> int:
        return _SIZES[self.value]

    @property
    def is_floating(self) -> bool:
        return self.value.endswith(("float32", "float16"))


_SIZES = {"float32": 4, "bfloat16": 2, "int64": 8, "int32": 4, "bool": 1}


@dataclass(slots=True, eq=False)
class Made:
    """Facts about a piece of memory, also after its release.

    Attributes:
        number: its name in the timeline; None if it was there before the run.
        memory: `number`, or one below zero.
        holders: units that hold this parameter, or one that this is a cast of.
        saved_by, kept_by: the first scope whose backward needs it; and that would keep it if
            blocks were recomputed selectively.
        is_taken: it was among the inputs of a block already.
        part: of a unit, that made it.
    """

    number: int | None
    size_bytes: int
    memory: int
    holders: frozenset[str] = frozenset()
    is_alive: bool = True
    saved_by: Scope | None = None
    kept_by: Scope | None = None
    is_taken: bool = False
    part: LayerSegment | None = None


class Storage:
    """The memory behind arrays; it lives as long as an array refers to it, as in torch."""

    __slots__ = ("_timeline", "made")

    def __init__(self, made: Made, timeline: Timeline) -> None:
        self.made = made
        self._timeline = timeline

    def __del__(self) -> None:
        self.made.is_alive = False
        if self.made.number is not None:
            self._timeline.release(self.made.number)


class Array:
    """A shape and strides over a storage; `node` is what made it, None outside the graph.

    `index` says which of the node's outputs it is.
    """

    __slots__ = ("__weakref__", "dtype", "index", "node", "shape", "storage", "strides", "tape")

    def __init__(
        self, tape: Tape, shape: Shape, strides: Shape, dtype: DType, storage: Storage
    ) -> None:
        self.tape = tape
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.storage = storage
        self.node: Node | None = None
        self.index = 0

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size_bytes

    @property
    def occupied_bytes(self) -> int:
        """Memory behind the elements; an expanded array occupies what it was expanded from."""
        return min(self.size_bytes, self.storage.made.size_bytes)

    @property
    def needs_gradient(self) -> bool:
        return self.node is not None

    @property
    def is_contiguous(self) -> bool:
        return fits(self.shape, self.strides, contiguous(self.shape))

    def detached(self) -> Array:
        """The same memory outside the graph."""
        return Array(self.tape, self.shape, self.strides, self.dtype, self.storage)


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
