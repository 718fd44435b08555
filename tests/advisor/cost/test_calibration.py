"""Shares of tiles that products fill."""

from __future__ import annotations

import pytest

from advisor.cost.calibration import column_share, tile_share
from profiles.model.work import ProductKind


@pytest.mark.parametrize(("rows", "share"), [(64, 1 / 2), (128, 1), (129, 129 / 256), (0, 1)])
def test_rows_of_an_expert_are_computed_in_whole_tiles_of_128(rows: float, share: float) -> None:
    assert tile_share(rows, ProductKind.GROUPED) == share
    assert tile_share(rows, ProductKind.LINEAR) == 1


@pytest.mark.parametrize(("columns", "share"), [(32, 1 / 2), (64, 1), (96, 3 / 4)])
def test_columns_of_a_convolution_are_computed_in_whole_tiles_of_64(
    columns: float, share: float
) -> None:
    assert column_share(columns) == share
