"""A case: a name, what it does, and how long it may take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.gpu.results import Row
from tests.gpu.setting import Setting


@dataclass(frozen=True, slots=True)
class Case:
    """One case of a part.

    Attributes:
        run: yields rows as they come; raises `LeftOutError` where something is not here.
        limit_s: beyond, it counts as failed, and its process is ended.
        is_small: it runs on the CPU too, to try the logic.
    """

    name: str
    run: Callable[[Setting], Iterable[Row]]
    limit_s: float = 60.0
    is_small: bool = False
