"""Rates of kernels beside those that an H200 was measured at (`make gpu`, part f)."""

from __future__ import annotations

import pytest

from advisor.cost.calibration import CALIBRATION
from advisor.cost.rates import DeviceRates
from advisor.cost.work import AttentionLoad, ProductLoad
from profiles.machine import catalogue
from profiles.model.work import AttentionKernel, ProductKind
from profiles.provenance import BENCH
from profiles.workload.stack import TORCH
from tests.gpu.results import RESULTS, Results

RESULT = Results.load(RESULTS)
assert RESULT.bench is not None
H200 = RESULT.bench.device


def measured(case: str) -> dict[str, float]:
    """By term."""
    (result,) = (c for c in RESULT.of_part("f") if c.name == case)
    return {row.term: row.measured for row in result.rows}


def product_s(m: int, n: int, k: int, rates: DeviceRates) -> float:
    flop, moved = 2.0 * m * n * k, 2.0 * (m * n + n * k + m * k)
    load = ProductLoad(ProductKind.LINEAR, m, n, k, 1, flop, 2 * flop, moved, 2 * moved)
    return rates.product_s(load, flop, moved)


@pytest.fixture(scope="module")
def rates() -> DeviceRates:
    return DeviceRates.of(H200, "bfloat16", TORCH, CALIBRATION)


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(16_384, 50_257, 1600), (16_384, 1600, 50_257), (16_384, 50_304, 2048), (16_384, 6144, 2048)],
)
def test_products_take_what_was_measured(m: int, n: int, k: int, rates: DeviceRates) -> None:
    """A vocabulary of 50,257 takes five times as long as one of 50,304 for its size."""
    assert product_s(m, n, k, rates) == pytest.approx(
        measured("layers")[f"{m} x {n} x {k}"], rel=0.2
    )


def test_elementwise_kernels_reach_a_rate_between_those_measured(rates: DeviceRates) -> None:
    """Softmax and casts are slower, adding is as fast as a copy."""
    reached = measured("elementwise")
    assert reached["layer norm"] < rates.elementwise < reached["gelu"]
    assert rates.elementwise < 0.7 * rates.bandwidth


def test_compiled_and_fused_kernels_are_bound_by_memory() -> None:
    compiled = TORCH.model_copy(update={"compiled": True})
    rates = DeviceRates.of(H200, "bfloat16", compiled, CALIBRATION)
    assert rates.elementwise == rates.bandwidth


def test_a_memory_that_is_slow_for_its_multiprocessors_keeps_them_waiting() -> None:
    rates = DeviceRates.of(catalogue.accelerator("V100-SXM2-32GB"), "float16", TORCH, CALIBRATION)
    assert rates.elementwise == rates.bandwidth


def test_products_in_a_row_are_slower_than_those_of_a_step_where_power_binds() -> None:
    fraction = H200.matmul_fraction
    assert fraction.origin == BENCH
    in_step = CALIBRATION.matmul_share(H200)
    assert in_step == pytest.approx(CALIBRATION.between * fraction.value)
    learned = H200.model_copy(
        update={"matmul_fraction": fraction.model_copy(update={"origin": "10 runs"})}
    )
    assert CALIBRATION.matmul_share(learned) == fraction.value


def test_narrow_heads_wait_for_exponentials(rates: DeviceRates) -> None:
    """On an H200 heads of 64 reached 381 TFLOP/s where those of 128 did 487 (2,048 tokens)."""

    def seconds(width: int, kernel: AttentionKernel) -> float:
        return rates.attention_s(AttentionLoad(kernel, width, 1e12, 2.5e12), forward=True)

    third = AttentionKernel.FLASH3
    assert seconds(64, third) / seconds(128, third) == pytest.approx(487 / 381, rel=0.05)
    second = AttentionKernel.FLASH2
    assert seconds(64, second) == seconds(128, second)
