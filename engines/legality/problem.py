"""A rule that a plan breaks."""

from __future__ import annotations

from profiles.record import Record


class Problem(Record):
    """A reason why a plan is not possible: the rule, the fact with numbers, and the way out."""

    rule: str
    what: str
    hint: str = ""

    def __str__(self) -> str:
        return self.what
