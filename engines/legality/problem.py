"""What stands in the way of a plan."""

from __future__ import annotations

from profiles.record import Record


class Problem(Record):
    """Why a plan is not possible: the rule, what is wrong with numbers, and the way out."""

    rule: str
    what: str
    hint: str = ""

    def __str__(self) -> str:
        return self.what
