"""`precision=fp8`: products, casts and memory of a plan, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from advisor.cost import CostModel
from advisor.cost.breakdown import Estimate
from advisor.cost.calibration import CALIBRATION
from advisor.cost.compute.rates import DeviceRates, peak_flop_per_s
from advisor.cost.load.casts import (
    EAGER,
    FUSED,
    Casts,
    cast_count,
    cast_elements,
    is_cast,
    with_casts,
)
from advisor.cost.load.unit_load import UnitLoad
from advisor.cost.load.work import ProductLoad
from advisor.inputs.facts import Facts
from engines.legality import problems
from engines.plan import Plan
from profiles.closed_forms.transformer import TransformerShape, transformer_profile
from profiles.machine.clusters import cluster_from_name
from profiles.model.work import ProductKind
from profiles.workload.eight_bits import takes_eight_bits
from profiles.workload.stack import TORCH, compiled, in_eight_bits, stack_named
from profiles.workload.workload import Workload

DTYPE = "float8_e4m3fn"
H100 = cluster_from_name("8xH100-SXM-80GB")
SHAPE = TransformerShape(
    kind="llama", layers=4, hidden=4096, heads=32, kv_heads=32, ffn=16384, vocab=32_000,
    length=2048, gated=True, tied=False, head_width=128,
)  # fmt: skip
FACTS = Facts(
    model=transformer_profile(SHAPE, name="llama"),
    cluster=H100,
    workload=Workload(global_batch_size=32, precision="bf16"),
)


def product(m: int, n: int, k: int, kind: ProductKind = ProductKind.LINEAR) -> ProductLoad:
    flop = 2.0 * m * n * k
    return ProductLoad(
        kind, m, n, k, 1, flop, 2 * flop, 2.0 * (m * k + n * k + m * n), 4.0 * (m * k + n * k)
    )


def estimate(settings: str) -> Estimate:
    plan = Plan.parse(f"dp_shard=8 microbatch_size=4 {settings}")
    return CostModel(FACTS).estimate(plan)


@pytest.mark.parametrize(
    ("inputs", "outputs", "does"),
    [(64, 64, True), (48, 4096, False), (4096, 16, False), (4096, 4100, False), (4096, 128, True)],
)
def test_wide_layers_of_even_width_take_8_bits(inputs: int, outputs: int, does: bool) -> None:
    assert takes_eight_bits(inputs, outputs) is does


def test_a_forward_casts_two_factors_and_a_backward_four() -> None:
    one = product(8, 64, 128)
    assert cast_count(one, forward=True) == 2
    assert cast_elements(one, forward=True) == 8 * 128 + 64 * 128
    assert cast_count(one, forward=False) == 4
    assert cast_elements(one, forward=False) == 8 * 128 + 64 * 128 + 2 * 8 * 64


@pytest.mark.parametrize("kind", [ProductKind.GROUPED, ProductKind.SCORES, ProductKind.CONVOLUTION])
def test_products_of_other_layers_stay_in_16_bits(kind: ProductKind) -> None:
    stack = in_eight_bits(TORCH, DTYPE)
    eight, sixteen = (
        DeviceRates.of(H100.device, dtype, own, CALIBRATION)
        for dtype, own in ((DTYPE, stack), ("bfloat16", TORCH))
    )
    other = product(8192, 4096, 4096, kind)
    assert not is_cast(other)
    seconds = [
        r.product_s(other, other.forward_flop, other.forward_bytes) for r in (eight, sixteen)
    ]
    assert seconds[0] == seconds[1]


def test_a_product_takes_its_casts_and_less_than_half_the_peak_s_time() -> None:
    one = product(65_536, 16_384, 16_384)
    plain = DeviceRates.of(H100.device, "bfloat16", TORCH, CALIBRATION)
    for stack, casts in ((TORCH, EAGER), (compiled(TORCH), FUSED)):
        rates = DeviceRates.of(H100.device, DTYPE, in_eight_bits(stack, DTYPE), CALIBRATION)
        assert rates.cast_kernels([one], forward=True) == 2 * casts.kernels
        seconds = rates.product_s(one, one.forward_flop, one.forward_bytes)
        moving = casts.moved_bytes * cast_elements(one, forward=True) / rates.elementwise
        whole = plain.product_s(one, one.forward_flop, one.forward_bytes)
        # H100: 1979 TFLOP/s in 8 bits, 989 in 16; of the best rates nine tenths of twice.
        assert seconds - moving == pytest.approx(whole / 2 / 0.9, rel=0.02)
        peaks = [peak_flop_per_s(H100.device, dtype).value for dtype in (DTYPE, "bfloat16")]
        assert peaks[0] == pytest.approx(2 * peaks[1], rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "casts"), [("precision=fp8", EAGER), ("precision=fp8 compile=true", FUSED)]
)
def test_casts_hold_copies_of_the_largest_factor(settings: str, casts: Casts) -> None:
    """Of 8,192 tokens: the inputs of `down`; backward the gradients of gate and up in one."""
    added: list[tuple[float, float]] = []
    for precision in ("precision=bf16", "precision=fp8"):
        plan = Plan.parse(
            f"dp_shard=8 microbatch_size=4 {settings.replace('precision=fp8', precision)}"
        )
        block = next(u for u in CostModel(FACTS).under(plan).loads(plan).runs if u.is_block)
        added.append((block.forward_transient_bytes, block.backward_transient_bytes))
    (forward, backward), (cast_forward, cast_backward) = added
    assert cast_forward - forward == casts.held_bytes * 8192 * 16384
    assert cast_backward - backward == casts.held_bytes * 8192 * 2 * 16384


def test_compiled_blocks_keep_no_inputs_of_layers_in_8_bits() -> None:
    """Outputs of products and of attention are there; what is between is made again. Experts'
    inputs stay."""
    fused, plain, eager, eager_plain = (
        _block(f"dp_shard=8 microbatch_size=4 precision={precision} compile={compiled}")
        for compiled in ("true", "false")
        for precision in ("fp8", "bf16")
    )
    assert fused.activation_bytes == plain.selective_bytes < plain.activation_bytes
    assert eager.activation_bytes == eager_plain.activation_bytes
    grouped = fused.work.products[0]._replace(kind=ProductKind.GROUPED)
    of_experts = replace(plain, work=replace(plain.work, products=(*plain.work.products, grouped)))
    assert with_casts(of_experts, FUSED).activation_bytes == plain.activation_bytes


def _block(settings: str) -> UnitLoad:
    plan = Plan.parse(settings)
    return next(u for u in CostModel(FACTS).under(plan).loads(plan).runs if u.is_block)


def test_what_is_not_computed_by_linear_layers_costs_the_same() -> None:
    plain, eight = estimate("precision=bf16"), estimate("precision=fp8")
    assert eight.memory.parameters == plain.memory.parameters
    assert eight.memory.optimizer == plain.memory.optimizer
    assert eight.time.optimizer_s == plain.time.optimizer_s


def test_software_that_is_not_torchs_casts_beside_its_products() -> None:
    """Transformer Engine's casts, as published runs of Megatron are priced."""
    stack = stack_named("megatron-core-0.12")
    said = stack.model_copy(update={"product_dtype": DTYPE})
    plans = [Plan.parse(f"dp_shard=8 microbatch_size=4 precision={p}") for p in ("fp8", "bf16")]
    by_plan, by_stack, plain = (
        CostModel(FACTS.rebuilt(stack=own)).estimate(plan)
        for own, plan in ((stack, plans[0]), (said, plans[1]), (stack, plans[1]))
    )
    assert by_plan.step_s == by_stack.step_s < plain.step_s


def test_a_device_without_units_for_8_bits_is_refused_and_a_cpu_emulates_them() -> None:
    plan = Plan.parse("dp_replicate=8 microbatch_size=1 precision=fp8")
    a100 = cluster_from_name("8xA100-SXM-80GB")
    (problem,) = problems(plan, FACTS.model, a100)
    assert problem.rule == "precision-8-bit"
    assert "A100-SXM-80GB does not multiply in 8 bits (float8_e4m3fn)" in problem.what
    assert problem.hint == "set precision=bf16"
    assert not list(problems(plan, FACTS.model, H100))
