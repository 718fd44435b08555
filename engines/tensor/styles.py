"""Styles of split layers: `Plan.tensor_styles` as values. No torch here."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Self

from pydantic import PositiveInt

from profiles.errors import UnknownNameError
from profiles.record import Record


class Kind(StrEnum):
    """The kind of a split: what becomes of a module's parameters, inputs and outputs."""

    COLUMN = "column"  # output features split; what follows sees this rank's share
    HEADS = "heads"  # of fewer heads than ranks: whole, and a rank computes the head that it needs
    ROW = "row"  # input features split; partial outputs are summed over the ranks
    GATHER = "gather"  # as column, outputs put together again: right everywhere, most traffic
    VOCAB = "vocab"  # rows of an embedding; or of the head, whose logits stay split for the loss
    SEQUENCE = "sequence"  # of a block: but for its pairs a rank has its share of the tokens
    ENTRY = "entry"  # of a sequence block: it takes whole sequences, and splits them
    EXIT = "exit"  # of a sequence block: it returns whole sequences
    JOINED = "joined"  # within a sequence block: takes the whole sequence again
    SIZES = "sizes"  # attributes that count heads or features say this rank's share in forward
    BIAS = "bias"  # tensors with a number for every head are this rank's heads: see `head_bias`


class Style(Record):
    """One entry of a tensor plan: "column", "column/3", "sizes(num_heads)" or "bias/8(alibi)", say.

    Attributes:
        packs: tensors that lie side by side in one weight (a fused query, key and value are 3); the
            heads of `Kind.HEADS` and `Kind.BIAS`; how many shares the attributes of `Kind.SIZES`
            say.
        sizes: the attributes of `Kind.SIZES`; the parameters, buffers and arguments of `Kind.BIAS`.
    """

    kind: Kind
    packs: PositiveInt = 1
    sizes: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.kind}/{self.packs}" if self.packs > 1 else str(self.kind)
        return f"{text}({'+'.join(self.sizes)})" if self.kind in NAMING else text

    @classmethod
    def parse(cls, text: str) -> Self:
        """The style that `text` writes.

        Raises:
            UnknownNameError: there is no such style.
        """
        match = _FORM.fullmatch(text)
        kinds = [kind.value for kind in Kind]
        kind, packs, sizes = match.groups() if match else (text, None, None)
        if kind not in kinds or (sizes is not None) != (kind in NAMING):
            known = [name for name in kinds if name not in NAMING]
            forms = ["column/3", "sizes(NAME)", "bias/HEADS(NAME)"]
            raise UnknownNameError("tensor style", text, [*known, *forms])
        return cls(
            kind=Kind(kind),
            packs=int(packs) if packs else 1,
            sizes=tuple(sizes.split("+")) if sizes else (),
        )


LAYER_KINDS = (Kind.COLUMN, Kind.HEADS, Kind.ROW, Kind.GATHER, Kind.VOCAB)
"""Those that cut a layer's parameters or, `HEADS`, their use."""
CUTTING = (*LAYER_KINDS, Kind.BIAS)
"""Those that may cut parameters of the module that has them."""
NAMING = (Kind.SIZES, Kind.BIAS)
"""Those that name what is in a module. They follow from its code, and are found by trial."""
LOCAL = (Kind.COLUMN, Kind.HEADS)
"""Those whose outputs only a row-wise layer takes."""
_FORM = re.compile(r"([a-z]+)(?:/([1-9]\d*))?(?:\(([A-Za-z_]\w*(?:\+[A-Za-z_]\w*)*)\))?")


def cutting(styles: Iterable[Style]) -> Style | None:
    """The one among a module's styles that cuts its parameters."""
    return next((style for style in styles if style.kind in LAYER_KINDS), None)


def matches(pattern: str, name: str) -> bool:
    """True if a module's path fits a pattern; `*` stands for characters of one part of it."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def styles_of(
    pairs: Iterable[tuple[str, str]], names: Sequence[str]
) -> dict[str, tuple[Style, ...]]:
    """The styles of every module that a pattern of `pairs` fits, in the order of `names`.

    A style that several patterns give a module is one style.

    Raises:
        UnknownNameError: a pattern fits no module, or a style does not exist.
    """
    styles: dict[str, dict[Style, None]] = {}
    for pattern, text in pairs:
        fitting = [name for name in names if matches(pattern, name)]
        if not fitting:
            raise UnknownNameError("module", pattern, names, where=f"tensor style `{text}`")
        for name in fitting:
            styles.setdefault(name, {})[Style.parse(text)] = None
    return {name: ordered(styles[name]) for name in names if name in styles}


def by_pattern(pairs: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """(pattern, style) pairs with all styles of a pattern together, as files of plans have them."""
    texts: dict[str, list[str]] = {}
    for pattern, text in pairs:
        texts.setdefault(pattern, []).append(text)
    return tuple((pattern, text) for pattern, own in texts.items() for text in own)


def as_pairs(
    styles: Mapping[str, Sequence[Style]],
    names: Iterable[str],
    *,
    blocks: Collection[str] | None = None,
) -> tuple[tuple[str, str], ...]:
    """`styles` with equal layers of repeated blocks as one pattern: the reverse of `styles_of`.

    Args:
        names: of all modules; a pattern must fit none that has another style.
        blocks: paths of the repeated blocks, whose numbers a `*` stands for; None: of all numbers.
    """
    patterns = {name: _pattern(name, blocks) for name in names}
    alike: dict[str, list[str]] = {}
    for name in patterns:
        alike.setdefault(without_numbers(name), []).append(name)
    # The blocks of a network may lie at several depths: a pattern of some fits parts of others.
    common = {}
    for pattern in set(patterns.values()):
        fitting = (
            styles.get(name, ())
            for name in alike[without_numbers(pattern)]
            if patterns[name] == pattern or matches(pattern, name)
        )
        # Equal blocks have the same objects.
        different = {tuple(map(id, entries)): entries for entries in fitting}
        common[pattern] = set.intersection(*map(set, different.values()))
    pairs: dict[tuple[str, str], None] = {}
    for name, entries in styles.items():
        pattern = patterns[name]
        for style in entries:
            pairs[pattern if style in common[pattern] else name, str(style)] = None
    return tuple(pairs)


def ordered(styles: Iterable[Style]) -> tuple[Style, ...]:
    """The styles of one module in the order of `Kind`, each once."""
    return tuple(sorted(dict.fromkeys(styles), key=lambda style: list(Kind).index(style.kind)))


def _pattern(name: str, blocks: Collection[str] | None) -> str:
    """`name` with a `*` in place of the numbers of the innermost of `blocks` that it lies in."""
    if blocks is None:
        return without_numbers(name)
    block = name
    while block and block not in blocks:
        block = block.rpartition(".")[0]
    return without_numbers(block) + name[len(block) :]


@lru_cache(maxsize=2**16)
def without_numbers(name: str) -> str:
    """The pattern of a path: `*` for every number in it."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))
