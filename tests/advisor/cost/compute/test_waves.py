"""Waves of tiles, results hidden behind arithmetic, weights of experts."""

from __future__ import annotations

import pytest

from advisor.cost.calibration import CALIBRATION
from advisor.cost.compute.rates import DeviceRates
from advisor.cost.compute.waves import wave_share
from advisor.cost.load.work import ProductLoad, UnitWork, over_expert_ranks
from profiles.machine import catalogue
from profiles.model.work import ProductKind
from profiles.workload.stack import TORCH

A100 = catalogue.accelerator("A100-SXM-80GB")


def product(m: float, n: float, k: float, *, experts: int = 0) -> ProductLoad:
    kind = ProductKind.GROUPED if experts else ProductKind.LINEAR
    count = float(experts or 1)
    flop, moved = 2 * m * n * k * count, 2 * count * (m * k + k * n + m * n)
    return ProductLoad(kind, m, n, k, count, flop, 2 * flop, moved, 2 * moved)


def test_one_tile_more_than_a_wave_takes_two_waves() -> None:
    # 108 multiprocessors: 12 x 9 tiles of 256 x 128, and one row of tiles more.
    full = wave_share(A100, product(12 * 256, 9 * 128, 4096), forward=True)
    over = wave_share(A100, product(13 * 256, 9 * 128, 4096), forward=True)
    assert full == pytest.approx(1.0)
    assert over < 0.75


def test_devices_of_unknown_size_have_no_waves() -> None:
    other = A100.model_copy(update={"name": "another"})
    assert wave_share(other, product(130, 130, 64), forward=True) is None


def test_products_with_a_short_inner_dimension_hide_less_of_their_results() -> None:
    rates = DeviceRates.of(A100, "bfloat16", TORCH, CALIBRATION)

    def rate(k: float) -> float:
        one = product(65536, 4096, k)
        return one.forward_flop / rates.product_s(one, one.forward_flop, one.forward_bytes)

    assert rate(768) < 0.9 * rate(8192)


def test_a_rank_reads_the_weights_of_its_own_experts() -> None:
    whole = product(16, 4096, 2048, experts=64)
    (own,) = over_expert_ranks(UnitWork((whole,)), 8).products
    assert (own.m, own.repeats) == (128, 8)
    assert own.forward_bytes == 2 * (64 * 16 * (2048 + 4096) + 8 * 4096 * 2048)
    assert own.forward_flop == whole.forward_flop
