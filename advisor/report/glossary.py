"""The words of this field, as the report and the documents use them: `advise explain WORD`.

The words are in glossary.toml; what a plan has of each is in `glossary_numbers`.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from profiles.errors import InputError, UnknownNameError, near_misses

if TYPE_CHECKING:
    from advisor.decide.decision import Decision
    from advisor.inputs.wrapped import Wrapped


@dataclass(frozen=True, slots=True)
class Term:
    """A word, its other names, and two sentences on it."""

    name: str
    heading: str
    says: str
    also: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """A term, and what a plan has of it."""

    term: Term
    number: str | None = None

    def __str__(self) -> str:
        others = f" ({', '.join(self.term.also)})" if self.term.also else ""
        lines = [f"{self.term.name}{others}", f"  {self.term.says}"]
        if self.number is not None:
            lines.append(f"  here: {self.number}")
        return "\n".join(lines)

    def __rich__(self) -> Wrapped:
        from advisor.inputs.wrapped import Wrapped

        return Wrapped(str(self))


def explain(word: str, decision: Decision | None = None) -> Explanation:
    """What `word` means, in any case and with any hyphens; with the number of a decision's plan.

    >>> explain("All_Reduce").term.name, explain("HSDP").term.heading
    ('all-reduce', 'parallelism')

    Raises:
        UnknownNameError: not a term; the near miss is named.
        InputError: not a term, and nothing like it is.
    """
    found = _by_word().get(_plain(word)) or _by_word().get(_plain(word).removesuffix("s"))
    if found is None:
        every = [name for term in terms() for name in (term.name, *term.also)]
        if near_misses(word, every):
            raise UnknownNameError("term", word, every, hints=[_LISTED])
        raise InputError(f"`{word}` is not in the glossary", hints=[_LISTED])
    number = None
    if decision is not None:
        from advisor.report.glossary_numbers import number_of

        number = number_of(found.name, decision)
    return Explanation(found, number)


_LISTED = "`advise explain` lists the terms"


class Listing:
    """All terms under their headings."""

    def __str__(self) -> str:
        headings = dict.fromkeys(term.heading for term in terms())
        lines = [
            f"{heading}: {', '.join(term.name for term in terms() if term.heading == heading)}"
            for heading in headings
        ]
        return "\n".join([*lines, "", "`advise explain TERM`, `advise explain TERM plan.json`"])

    def __rich__(self) -> Wrapped:
        from advisor.inputs.wrapped import Wrapped

        return Wrapped(str(self))


@cache
def terms() -> tuple[Term, ...]:
    """All of them, in the order of the file."""
    text = resources.files("advisor.report").joinpath("glossary.toml").read_text(encoding="utf-8")
    return tuple(
        Term(name, heading, entry["says"], tuple(entry.get("also", ())))
        for heading, entries in tomllib.loads(text).items()
        for name, entry in entries.items()
    )


@cache
def _by_word() -> dict[str, Term]:
    return {_plain(word): term for term in terms() for word in (term.name, *term.also)}


def _plain(word: str) -> str:
    """`all_reduce`, `All-Reduce` and `all reduce` are one word."""
    return re.sub(r"[\s_-]+", " ", word.strip().lower())
