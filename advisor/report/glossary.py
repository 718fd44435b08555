"""Glossary of the report and the documentation: `advise explain WORD`.

Definitions are in glossary.toml; `glossary_numbers` gives a plan's value of each term.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from advisor.inputs.wrapped import ShownAsText
from profiles.errors import InputError, UnknownNameError, near_misses
from profiles.record import toml_table

if TYPE_CHECKING:
    from advisor.decide.decision import Decision


@dataclass(frozen=True, slots=True)
class GlossaryTerm:
    """A term, its aliases, and a definition of two sentences."""

    name: str
    heading: str
    says: str
    also: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation(ShownAsText):
    """A term, and its value for a plan."""

    term: GlossaryTerm
    number: str | None = None

    def __str__(self) -> str:
        others = f" ({', '.join(self.term.also)})" if self.term.also else ""
        lines = [f"{self.term.name}{others}", f"  {self.term.says}"]
        if self.number is not None:
            lines.append(f"  here: {self.number}")
        return "\n".join(lines)


def explain(word: str, decision: Decision | None = None) -> Explanation:
    """Explain `word`, ignoring case and hyphens; with its value for a decision's plan.

    >>> explain("All_Reduce").term.name, explain("HSDP").term.heading
    ('all-reduce', 'parallelism')

    Raises:
        UnknownNameError: not a term; the near miss is named.
        InputError: not a term, and nothing like it is.
    """
    term = _by_word().get(_plain(word)) or _by_word().get(_plain(word).removesuffix("s"))
    if term is None:
        every = [name for entry in terms() for name in (entry.name, *entry.also)]
        if near_misses(word, every):
            raise UnknownNameError("term", word, every, hints=[_LISTED])
        raise InputError(f"`{word}` is not in the glossary", hints=[_LISTED])
    number = None
    if decision is not None:
        from advisor.report.glossary_numbers import number_of

        number = number_of(term.name, decision)
    return Explanation(term, number)


_LISTED = "`advise explain` lists the terms"


class Listing(ShownAsText):
    """All terms grouped by heading."""

    def __str__(self) -> str:
        headings = dict.fromkeys(term.heading for term in terms())
        lines = [
            f"{heading}: {', '.join(term.name for term in terms() if term.heading == heading)}"
            for heading in headings
        ]
        return "\n".join([*lines, "", "`advise explain TERM`, `advise explain TERM plan.json`"])


@cache
def terms() -> tuple[GlossaryTerm, ...]:
    """Return all terms, in file order."""
    text = resources.files("advisor.report").joinpath("glossary.toml").read_text(encoding="utf-8")
    return tuple(
        GlossaryTerm(name, heading, entry["says"], tuple(entry.get("also", ())))
        for heading, entries in toml_table(text, where="glossary.toml").items()
        for name, entry in entries.items()
    )


@cache
def _by_word() -> dict[str, GlossaryTerm]:
    return {_plain(word): term for term in terms() for word in (term.name, *term.also)}


def _plain(word: str) -> str:
    """Normalize case, hyphens and underscores: `all_reduce`, `All-Reduce` and `all reduce` are
    equal."""
    return re.sub(r"[\s_-]+", " ", word.strip().lower())
