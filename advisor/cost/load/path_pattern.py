"""Patterns of `Plan.tensor_styles`, taken apart for many paths."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple


class PathPattern(NamedTuple):
    """`engines.tensor.styles.matches`, for one pattern and many paths.

    `names`: literal parts by position; `others` for alternatives.
    """

    length: int
    names: tuple[tuple[int, str], ...]
    others: tuple[tuple[int, str], ...]

    @classmethod
    def of(cls, pattern: str) -> PathPattern:
        parts = list(enumerate(pattern.split(".")))
        others = tuple(part for part in parts if set("*?[") & set(part[1]))
        return cls(len(parts), tuple(part for part in parts if part not in others), others)

    @property
    def is_numbered(self) -> bool:
        """Return True if the pattern fits some blocks of a list and not others."""
        numbers = any(name.isdecimal() for _, name in self.names)
        return numbers or any(wanted != "*" for _, wanted in self.others)

    def may_fit(self, parts: Sequence[str]) -> bool:
        """Return True if the pattern may fit a path that begins with `parts`."""
        return all(parts[place] == name for place, name in self.names if place < len(parts))

    def fits(self, parts: Sequence[str]) -> bool:
        """Return True if the pattern matches a path of the same length."""
        return all(parts[place] == name for place, name in self.names) and all(
            fnmatchcase(parts[place], wanted) for place, wanted in self.others
        )
