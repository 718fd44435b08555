"""Rates of kernels beside those that an H200 was measured at (`make gpu`, part f)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from advisor.cost.calibration import CALIBRATION
from advisor.cost.compute.rates import DeviceRates
from advisor.cost.compute.unit_times import optimizer_s
from advisor.cost.load.work import AttentionLoad, ProductLoad
from engines.plan import Plan
from profiles.machine import catalogue
from profiles.machine.cluster import Device
from profiles.model.kernel_cycles import COPY, POINTWISE, Operand, charge
from profiles.model.profile import ParameterShape
from profiles.model.work import AttentionKernel, ProductKind
from profiles.provenance import BENCH
from profiles.workload.optimizers import OPTIMIZERS, upkeep
from profiles.workload.stack import TORCH
from tests.factories import chain
from tests.gpu.results import RESULTS, UNSEEN, Results

RESULT = Results.load(RESULTS)
assert RESULT.bench is not None
H200 = RESULT.bench.device
UNSEEN_RESULT = Results.load(UNSEEN)
assert UNSEEN_RESULT.bench is not None
H100 = UNSEEN_RESULT.bench.device


def measured(case: str, part: str = "f") -> dict[str, float]:
    """By term."""
    (result,) = (c for c in RESULT.of_part(part) if c.name == case)
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


@pytest.mark.parametrize(
    ("term", "kernel", "dtype", "tensors"),
    [
        ("add", POINTWISE, "bfloat16", 3),
        ("gelu", "gelu", "bfloat16", 2),
        ("layer norm", "native_layer_norm", "bfloat16", 2),
        ("cast to fp32", COPY, "float32", 3),
    ],
)
def test_kernels_whose_cycles_are_counted_reach_what_was_measured(
    term: str, kernel: str, dtype: str, tensors: int
) -> None:
    """None was among those that the cycles were taken from: 2.1 to 4.3 TB/s."""
    shape, strides = (16_384, 8192), (8192, 1)
    given, out = (Operand(shape, strides, name) for name in ("bfloat16", dtype))
    inputs = [given] * (tensors - 1 if kernel == POINTWISE else 1)
    moved = 2 * tensors * given.elements
    rates = DeviceRates.of(H200, "bfloat16", TORCH, CALIBRATION, charges_kernels=True)
    seconds = rates.moving_s(moved, charge(kernel, inputs, [out]).cycles)
    assert moved / seconds == pytest.approx(measured("elementwise")[term], rel=0.1)


def test_compiled_and_fused_kernels_are_bound_by_memory() -> None:
    compiled = TORCH.model_copy(update={"compiled": True})
    rates = DeviceRates.of(H200, "bfloat16", compiled, CALIBRATION)
    assert rates.elementwise == rates.bandwidth


def test_instructions_take_the_less_of_a_kernel_the_slower_the_memory() -> None:
    def share(device: Device) -> float:
        rates = DeviceRates.of(device, "float16", TORCH, CALIBRATION)
        return rates.elementwise / rates.bandwidth

    v100 = catalogue.accelerator("V100-SXM2-32GB")
    assert share(v100) > 0.85 > 0.75 > share(H100) > 0.6 > share(H200)


def test_kernels_bound_by_memory_take_what_they_took_in_steps_on_an_h100() -> None:
    """The same multiprocessors as an H200's and 0.7 of its bandwidth: by neither alone."""
    took = {case.name: case.rows for case in UNSEEN_RESULT.of_part("f")}
    (row,) = (r for r in took["kernels of a step, gpt-1.3b"] if r.term == "the rest")
    assert row.from_bench is not None
    rates = DeviceRates.of(H100, "bfloat16", TORCH, CALIBRATION)
    before = 0.075 * H100.flop_per_s["float32"].value / 2  # with which it was predicted
    assert row.from_bench * before / rates.elementwise == pytest.approx(row.measured, rel=0.1)


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


@pytest.mark.parametrize(
    ("rows", "tokens", "heads", "width"),
    [(1, 8192, 16, 128), (8, 2048, 16, 64), (4, 2048, 16, 128), (64, 197, 16, 64)],
)
def test_attention_takes_what_was_measured_of_long_and_short_sequences(
    rows: int, tokens: int, heads: int, width: int, rates: DeviceRates
) -> None:
    """Causal, in FLOP/s of the pairs that are seen: 530 at 8,192 tokens, 66 backward at 197."""
    reached = measured("attention, as torch chooses", "b")
    flop = 2.0 * rows * heads * tokens**2 * width
    call = AttentionLoad(
        AttentionKernel.FLASH3, width, flop, 2.5 * flop, queries=tokens, keys=tokens, is_causal=True
    )
    shape = f"{rows} x {heads} x {tokens} x {width}"
    forward, backward = (
        rates.attention_s(call, forward=True),
        rates.attention_s(call, forward=False),
    )
    both = reached[f"{shape}, forward"], reached[f"{shape}, backward"]
    assert forward + backward == pytest.approx(flop / both[0] + 2.5 * flop / both[1], rel=0.25)


def test_products_in_fp32_reach_what_was_measured() -> None:
    rates = DeviceRates.of(H200, "float32", TORCH, CALIBRATION)
    edge = 8192
    seconds = product_s(edge, edge, edge, rates)
    rate = measured("products in float32", "b")[str(edge)]
    assert 2.0 * edge**3 / seconds == pytest.approx(rate, rel=0.1)


def test_adafactor_waits_for_numbers_of_each_tensor() -> None:
    """A step of a GPT of 125 million parameters took 170 to 370 us a tensor more with it."""
    tensors = 100
    shape = ParameterShape(sizes=(1000, 1000), element_bytes=4)
    units = [u.model_copy(update={"shapes": (shape,)}) for u in chain(units=tensors).units]
    step = upkeep(OPTIMIZERS["adafactor"], units)
    plan = Plan.parse("precision=bf16 microbatch_size=4")
    waiting, without = (
        optimizer_s(plan, each, device=H200, ranks=1) for each in (step, replace(step, read_back=0))
    )
    assert 170e-6 < (waiting - without) / tensors < 370e-6
    assert upkeep(OPTIMIZERS["adamw"], units).read_back == 0
