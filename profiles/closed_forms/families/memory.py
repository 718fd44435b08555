"""Memory of a run: pieces of a known size without values, and who saves them for backward."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from profiles.trace.scopes import LayerSegment, Scope
from profiles.trace.tally import SavedBytes
from profiles.trace.timeline import Timeline

Keeper = TypeVar("Keeper", bound=Hashable)


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


def saved_bytes(memory: Sequence[Made]) -> SavedBytes:
    """Bytes saved now, by the first scope that saved them; and those that would be if blocks
    saved only their inputs and the outputs of matrix products."""
    saved = [(made.saved_by, made) for made in memory if made.is_alive]
    selective = [
        (made.kept_by, made)
        for made in memory
        if made.is_alive or (made.kept_by is not None and made.kept_by.is_block)
    ]
    return SavedBytes(_sum(saved), _sum(selective), _of_parts(saved), _of_parts(selective))


def _sum(pairs: Iterable[tuple[Keeper | None, Made]]) -> dict[Keeper, int]:
    total: dict[Keeper, int] = {}
    for keeper, made in pairs:
        if keeper is not None:
            total[keeper] = total.get(keeper, 0) + made.size_bytes
    return total


def _of_parts(pairs: Iterable[tuple[Scope | None, Made]]) -> dict[LayerSegment, int]:
    """Of the bytes that scopes keep, the segments of them that made it."""
    return _sum(
        (made.part if made.part is not None and made.part.scope is scope else None, made)
        for scope, made in pairs
    )
