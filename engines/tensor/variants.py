"""Variants of the split of a pair of column-wise and row-wise layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from torch import nn

from engines.tensor.layers import features
from engines.tensor.rules import Pair
from engines.tensor.styles import Kind, Style, ordered
from engines.tensor.token_rules import SPLIT, join_places

Styles = dict[str, tuple[Style, ...]]
"""By module path."""
Counts = dict[str, tuple[str, ...]]
"""Names of attributes that count something, by module path."""


def variants(
    pair: Pair, styles: Mapping[str, Style], unit: nn.Module, *, size: int
) -> Iterator[Styles]:
    """The layers' `styles` alone; then with modules that count their heads or features.

    The right one is found by trial (`unit_proof`).
    """
    widths = {features(unit.get_submodule(path))[1] for path in pair.columns}
    widths.add(features(unit.get_submodule(pair.rows[0]))[0])
    for counted in _counts(pair, unit, widths, size):
        chosen: Styles = {path: (styles[path],) for path in pair.layers}
        for path, names in counted.items():
            chosen[path] = (Style(kind=Kind.SIZES, sizes=names),)
        yield chosen
        yield from _with_repeats(chosen, pair, styles, unit, size)


def _with_repeats(
    chosen: Styles, pair: Pair, styles: Mapping[str, Style], unit: nn.Module, size: int
) -> Iterator[Styles]:
    """`chosen` where few heads are repeated for many: with modules that count how often, or these.

    Of `few` heads a rank has one, and its share of the others: few / size of the repeats.
    """
    of_few = [styles[path] for path in pair.columns if styles[path].kind is Kind.HEADS]
    few = max((style.packs for style in of_few), default=0)
    if not few:
        return
    repeats: Styles = {}
    heads: Styles = {}
    for path in _around(pair):
        counts = _whole_numbers(unit.get_submodule(path))
        often = sorted(n for n, v in counts.items() if "group" in n and v * few % size == 0)
        known = sorted(n for n, v in counts.items() if "head" in n and v == few)
        if often:
            repeats[path] = (Style(kind=Kind.SIZES, packs=few, sizes=tuple(often)),)
        if known:
            heads[path] = (Style(kind=Kind.SIZES, packs=size // few, sizes=tuple(known)),)
    for more in ((repeats,), (heads,), (repeats, heads)):
        if all(more):
            paths = {path for each in more for path in each}
            added = {
                path: ordered(
                    (*chosen.get(path, ()), *(s for each in more for s in each.get(path, ())))
                )
                for path in sorted(paths)
            }
            yield {**chosen, **added}


def _around(pair: Pair) -> list[str]:
    """The modules that the layers of a pair lie in."""
    around = {""}
    for path in (*pair.columns, *pair.rows):
        parts = path.split(".")[:-1]
        around |= {".".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
    return sorted(around)


def _whole_numbers(module: nn.Module) -> dict[str, int]:
    """Attributes that may count heads or features."""
    return {
        name: value
        for name, value in vars(module).items()
        if type(value) is int and value > 1 and "head_dim" not in name
    }


def _counts(pair: Pair, unit: nn.Module, widths: set[int], size: int) -> list[Counts]:
    """Attributes that may count a rank's share: none, heads, both, features, or one alone; then
    those that count heads by their values, whatever their names."""
    heads: Counts = {}
    wide: Counts = {}
    both: Counts = {}
    valued: Counts = {}
    for path in _around(pair):
        numbers = _whole_numbers(unit.get_submodule(path))
        counts = {name: value for name, value in numbers.items() if value % size == 0}
        of_heads = {n for n in counts if "head" in n and "size" not in n and "dim" not in n}
        of_width = {n for n, value in counts.items() if value in widths} - of_heads
        by_value = {name for name, value in counts.items() if value in pair.counts}
        for chosen, names in (
            (heads, of_heads),
            (wide, of_width),
            (both, of_heads | of_width),
            (valued, of_heads | by_value),
        ):
            if names:
                chosen[path] = tuple(sorted(names))
    choices: list[Counts] = []
    alone: list[Counts] = [{path: (name,)} for path, names in both.items() for name in names]
    for choice in ({}, heads, both, wide, *alone, valued):
        if choice not in choices:
            choices.append(choice)
    return choices


def united(taken: Styles, more: Styles) -> Styles:
    """`taken` with `more` in place of a module's styles, but for the tensors by head that both
    name: two pairs may lie in one module."""
    return {
        **taken,
        **{
            path: ordered((*(s for s in taken.get(path, ()) if s.kind is Kind.BIAS), *styles))
            for path, styles in more.items()
        },
    }


ALONE = (SPLIT, Style(kind=Kind.ENTRY), Style(kind=Kind.EXIT))
"""Of a block by itself that is split by tokens."""


def sequence_variants(pairs: Sequence[Pair], styles: Styles) -> Iterator[Styles]:
    """Variants of splitting a unit by tokens as well, for its `pairs`.

    The sequence is joined where a pair begins: for the module around its column-wise layers, which
    may read the length, or for the layers themselves.
    """
    for inside in product((False, True), repeat=len(pairs)):
        joined: dict[str, None] = {}
        for pair, at_layers in zip(pairs, inside, strict=True):
            joined.update(dict.fromkeys(pair.columns if at_layers else join_places(pair)))
        chosen: Styles = {"": ordered((*styles.get("", ()), *ALONE))}
        for path in joined:
            chosen[path] = ordered((*styles.get(path, ()), Style(kind=Kind.JOINED)))
        yield chosen
