"""Tiles of fused attention against counting them."""

from __future__ import annotations

import pytest

from advisor.cost.compute.attention import DRAWS, ENDS, computed_share, drawn, padded_width
from advisor.cost.load.work import AttentionLoad
from profiles.machine import catalogue
from profiles.model.work import AttentionKernel

HOPPER, AMPERE = (catalogue.accelerator(name) for name in ("H100-SXM-80GB", "A100-SXM-80GB"))


def call(
    queries: int,
    keys: int,
    *,
    width: int = 64,
    is_causal: bool = False,
    kernel: AttentionKernel = AttentionKernel.FLASH3,
    dropout: bool = False,
) -> AttentionLoad:
    return AttentionLoad(
        kernel, width, 1.0, 2.5, queries=queries, keys=keys, is_causal=is_causal,
        dropout=dropout, scores=float(queries * keys),
    )  # fmt: skip


def walked(queries: int, keys: int, *, is_causal: bool, tile: int = 64) -> int:
    """Pairs that blocks of threads compute: of each tile of queries all tiles of keys it sees."""
    pairs = 0
    for first in range(0, queries, tile):
        seen = min(keys, first + tile) if is_causal else keys
        pairs += tile * tile * -(-seen // tile)
    return pairs


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("tokens", [64, 256, 2048])
def test_whole_tiles_and_the_ends_of_blocks_are_computed_for_the_pairs_that_count(
    tokens: int, is_causal: bool, forward: bool
) -> None:
    pairs = walked(tokens, tokens, is_causal=is_causal) + tokens * ENDS[forward]
    counted = tokens**2 * (0.5 if is_causal else 1.0)
    share = computed_share(call(tokens, tokens, is_causal=is_causal), HOPPER, forward=forward)
    assert share == pytest.approx(counted / pairs)


def test_tokens_that_fill_no_tile_are_computed_as_if_they_did() -> None:
    """197 tokens take as long as 256."""
    few, many = (computed_share(call(n, n), HOPPER, forward=True) for n in (197, 256))
    assert few / many == pytest.approx((197 / 256) ** 2)


def test_heads_are_padded_to_the_widths_of_kernels() -> None:
    later = {32: 64, 64: 64, 80: 128, 128: 128, 160: 256}
    assert {w: padded_width(w, is_later=True) for w in later} == later
    earlier = {32: 32, 80: 96, 96: 96}
    assert {w: padded_width(w, is_later=False) for w in earlier} == earlier
    shares = [computed_share(call(2048, 2048, width=w), HOPPER, forward=True) for w in (80, 128)]
    assert shares[0] / shares[1] == pytest.approx(80 / 128)


def test_kernels_of_the_second_generation_keep_their_own_widths_on_any_device() -> None:
    second = call(2048, 2048, width=32, kernel=AttentionKernel.FLASH2)
    third = second._replace(kernel=AttentionKernel.FLASH3)
    shares = [computed_share(c, d, forward=True) for c, d in ((second, HOPPER), (third, AMPERE))]
    assert shares[0] == shares[1] == 2 * computed_share(third, HOPPER, forward=True)


def test_random_numbers_are_drawn_for_every_score_and_only_with_dropout() -> None:
    assert drawn(call(100, 50, dropout=True), forward=True) == 5000 * DRAWS[True]
    assert drawn(call(100, 50), forward=True) == 0
