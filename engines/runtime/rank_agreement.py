"""Agreement of ranks on what each of them was given: model, optimizer, software, batches.

Ranks publish a digest of each topic on the rendezvous store: one round trip, and no collective that
other ranks would run with other shapes. They publish the facts themselves where digests differ.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from engines.runtime.world import World, say_holders, texts_of_ranks
from profiles.errors import RankMismatchError

log = logging.getLogger(__name__)

Facts = Mapping[str, Sequence[str]]
"""Items in their order, each with its aspects: {"`head.weight`": ("(61, 32)", "float32")}."""
_NOTHING = "nothing more"


@dataclass(frozen=True, slots=True)
class Topic:
    """One thing that ranks must have alike.

    Attributes:
        noun: of an item, as in "parameter `head.weight`".
        facts: of this rank.
        hint: the smallest change that makes ranks alike.
        part: ranks with another part of the model are not compared, say other stages.
        is_needed: a difference is an error; else it is warned of.
    """

    noun: str
    facts: Facts
    hint: str
    part: str = ""
    is_needed: bool = True

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    @property
    def text(self) -> str:
        return json.dumps([(item, list(aspects)) for item, aspects in self.facts.items()])


def require_agreement(topics: Sequence[Topic], world: World) -> None:
    """Compare the topics of all ranks; all of them call it with the same ones.

    Raises:
        RankMismatchError: names the first item that differs, what each rank has, and the other
            topics that differ.
        RankError: names the ranks that did not answer within `world.timeout_s`.
    """
    if world.size == 1 or world.is_fake:
        return
    own = json.dumps({topic.noun: [topic.part, topic.digest] for topic in topics})
    digests = [json.loads(text) for text in texts_of_ranks("ranks' digests", own, world)]
    differing = [topic for topic in topics if _differs([of[topic.noun] for of in digests])]
    needed = [topic for topic in differing if topic.is_needed]
    for topic in [*needed[:1], *(topic for topic in differing if not topic.is_needed)]:
        texts = texts_of_ranks(f"ranks' {topic.noun}", topic.text, world)
        parts = [of[topic.noun][0] for of in digests]
        what = _first_difference(topic.noun, [json.loads(text) for text in texts], parts)
        if topic.is_needed:
            also = [other.noun for other in differing if other is not topic]
            where = f"they disagree on this too: {', '.join(also)}" if also else None
            raise RankMismatchError(what, where=where, hints=[topic.hint])
        if world.rank == 0:
            log.warning("%s; %s", what, topic.hint)


def _differs(digests: Sequence[Sequence[str]]) -> bool:
    """True if ranks of the same part have different digests."""
    return len({part for part, _ in digests}) < len({(part, digest) for part, digest in digests})


def _first_difference(
    noun: str, facts: Sequence[Sequence[tuple[str, Sequence[str]]]], parts: Sequence[str]
) -> str:
    """The first item that differs from the one of the first rank with the same part."""
    firsts = {part: parts.index(part) for part in parts}
    place, part = min(
        (_place(facts[firsts[part]], own), part)
        for part, own in zip(parts, facts, strict=True)
        if own != facts[firsts[part]]
    )
    ranks = [rank for rank, other in enumerate(parts) if other == part]
    items = {rank: facts[rank][place] if place < len(facts[rank]) else None for rank in ranks}
    names = {rank: item[0] if item else _NOTHING for rank, item in items.items()}
    if len(set(names.values())) > 1:
        return f"{noun} number {place + 1}: {say_holders(names)}"
    aspects = {rank: item[1] for rank, item in items.items() if item}
    return f"{noun} {names[ranks[0]]}: {say_holders(_differing_aspects(aspects))}"


def _differing_aspects(aspects: Mapping[int, Sequence[str]]) -> dict[int, str]:
    """By rank the aspects of an item that another rank has not at the same place."""

    def differing(own: Sequence[str]) -> Iterator[str]:
        for place, aspect in enumerate(own):
            if any(other[place : place + 1] != [aspect] for other in aspects.values()):
                yield aspect

    return {rank: ", ".join(differing(own)) or _NOTHING for rank, own in aspects.items()}


def _place(one: Sequence[object], other: Sequence[object]) -> int:
    """The first place at which two lists differ."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
