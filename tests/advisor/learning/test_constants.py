"""Constants of a cluster before any run: what each of them is read from."""

from __future__ import annotations

import pytest

from advisor.learning.constants import own_errors, unit_times
from profiles.machine.cluster import AxisFits, Collective, Constant, LinkFit
from tests.factories import gpus


def _axis(group_size: int, stride: int, bytes_per_s: float, miss: float) -> AxisFits:
    fit = LinkFit(latency_s=1e-5, busbw_bytes_per_s=bytes_per_s, relative_residual=miss)
    return AxisFits(group_size=group_size, stride=stride, fits={Collective.ALL_REDUCE: fit})


def test_the_fits_of_an_axis_count_for_the_links_that_it_uses() -> None:
    axes = (_axis(8, 1, 100e9, 0.1), _axis(2, 8, 10e9, 0.3))
    cluster = gpus(2, 8).model_copy(update={"axes": axes})
    times, errors = unit_times(cluster, "bfloat16"), own_errors(cluster, "bfloat16")
    assert times[Constant.INTRA] == pytest.approx(1 / 100e9)
    assert times[Constant.INTER] == pytest.approx(1 / 10e9)
    assert errors[Constant.INTRA] == pytest.approx(0.1)
    assert errors[Constant.INTER] == pytest.approx(0.3)


def test_without_fits_the_rates_of_the_data_sheet_count() -> None:
    times = unit_times(gpus(2, 8), "bfloat16")
    assert times[Constant.INTRA] == pytest.approx(1 / 360e9)
    assert times[Constant.INTER] == pytest.approx(1 / 400e9)
