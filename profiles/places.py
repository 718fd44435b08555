"""Where in a model something happened, and what was run there."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Work:
    """What was run: see `UnitCost`."""

    flop: int = 0
    moved_bytes: int = 0
    kernels: int = 0


@dataclass(slots=True, eq=False)
class Place:
    """One call of a unit, or a stretch of code between two calls.

    Attributes:
        is_block: true inside a block, also for units that it calls.
        stands_for: an equal call that ran in full; what was run here is what was run there.
    """

    name: str
    is_block: bool = False
    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    input_bytes: int = 0
    output_bytes: int = 0
    stands_for: Place | None = None
