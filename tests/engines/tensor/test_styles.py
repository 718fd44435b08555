"""Styles as they are written in plans."""

from __future__ import annotations

import pytest

from engines.tensor.styles import Kind, Style, as_pairs, styles_of
from profiles.errors import UnknownNameError

NAMES = ["", "h", "h.0", "h.0.up", "h.0.down", "h.1", "h.1.up", "h.1.down", "head"]


@pytest.mark.parametrize(
    "text",
    ["column", "column/3", "row", "vocab", "sizes(num_heads+width)", "bias/8(alibi+return_1)"],
)
def test_styles_survive_parsing(text: str) -> None:
    assert str(Style.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["columns", "column/0", "sizes", "sizes()", "bias/4", "row(x)", "Row", ""]
)
def test_an_unknown_style_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(UnknownNameError, match="tensor style"):
        Style.parse(text)


def test_a_star_stands_for_one_part_of_a_path() -> None:
    actual = styles_of([("h.*.up", "column"), ("h.0.down", "row")], NAMES)
    assert list(actual) == ["h.0.up", "h.0.down", "h.1.up"]


def test_a_pattern_that_fits_nothing_is_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"h\.\*\.upp"):
        styles_of([("h.*.upp", "column")], NAMES)


def test_equal_blocks_are_written_as_one_pattern_and_unequal_ones_by_name() -> None:
    column, row = (Style(kind=Kind.COLUMN),), (Style(kind=Kind.ROW),)
    styles = {"h.0.up": column, "h.1.up": column, "h.1.down": row}
    pairs = as_pairs(styles, NAMES)
    assert pairs == (("h.*.up", "column"), ("h.1.down", "row"))
    assert styles_of(pairs, NAMES) == styles


# As in MobileViT: a block of the outer list opens into blocks of its own.
DEPTHS = ["s.0.h.0.up", "s.1.h.0.up", "s.1.h.1.up", "s.2.up"]
BLOCKS = {"s.0", "s.1.h.0", "s.1.h.1", "s.2"}


def test_a_pattern_of_deeper_blocks_gives_no_style_to_layers_that_are_whole() -> None:
    styles = {name: (Style(kind=Kind.GATHER),) for name in DEPTHS[1:3]}
    assert styles_of(as_pairs(styles, DEPTHS, blocks=BLOCKS), DEPTHS) == styles


def test_a_style_that_two_patterns_give_a_layer_is_one_style() -> None:
    styles = {name: (Style(kind=Kind.GATHER),) for name in DEPTHS}
    pairs = as_pairs(styles, DEPTHS, blocks=BLOCKS)
    assert {"s.*.h.0.up", "s.*.h.*.up"} <= {pattern for pattern, _ in pairs}
    assert styles_of(pairs, DEPTHS) == styles
