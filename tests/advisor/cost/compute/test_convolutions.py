"""Seconds of convolutions and norms of images against hand computation."""

from __future__ import annotations

import pytest

from advisor.cost import estimate
from advisor.cost.calibration import CALIBRATION
from advisor.cost.compute.rates import DeviceRates
from advisor.cost.compute.unit_times import unit_times
from advisor.cost.load.loads import loads_of
from advisor.cost.load.work import ProductLoad
from advisor.inputs.facts import Facts
from advisor.inputs.networks import network_profile
from engines.plan import Plan, Recompute
from profiles.closed_forms.convnets.draft import ConvnetBuilder
from profiles.closed_forms.convnets.profile import profile_of
from profiles.machine import catalogue
from profiles.machine.clusters import resolve_cluster
from profiles.model.profile import Numerics
from profiles.model.work import FusibleKind, ProductKind
from profiles.workload.stack import Stack
from profiles.workload.under_stack import under_stack
from profiles.workload.workload import Workload

PLAIN = Stack(name="plain", fused=(FusibleKind.LAYOUT,))
EXACT = PLAIN.model_copy(update={"tf32_convolutions": False})
SAMPLES = 64


def seconds(
    draft: ConvnetBuilder, device: str, dtype: str, stack: Stack = PLAIN
) -> tuple[float, float]:
    """Forward and backward of the last block."""
    model = under_stack(profile_of(draft.network("n"), samples=1), stack)
    kind = Numerics.AS_BUILT if dtype.endswith("32") else Numerics.BF16_AUTOCAST
    time = unit_times(
        loads_of(model, numerics=kind, samples=SAMPLES),
        recompute=Recompute.NONE,
        device=catalogue.accelerator(device),
        dtype=dtype,
        stack=stack,
    )[-1]
    return time.forward_s, time.backward_s


def convolution(kernel: int, *, groups: int = 1, width: int = 256) -> ConvnetBuilder:
    draft = ConvnetBuilder(56, channels=width)
    with draft.block("first", draft.image):
        x = draft.convolution(draft.image, width, 1)
    with draft.block("one", x):
        draft.convolution(x, width, kernel, groups=groups)
    return draft


def test_a_large_convolution_reaches_the_calibrated_share_of_the_peak() -> None:
    """1x1 on 256 channels of 56 x 56, in fp32 on a V100: 15.7 TFLOP/s; 52 GFLOP are large."""
    flop = SAMPLES * 2 * 56**2 * 256 * 256
    forward, backward = seconds(convolution(1), "V100-SXM2-16GB", "float32")
    assert forward == pytest.approx(flop / (15.7e12 * CALIBRATION.vector), rel=0.02)
    assert backward == pytest.approx(2 * forward, rel=0.02)


def test_convolutions_in_fp32_run_in_tf32_where_there_are_units_for_it() -> None:
    """1x1 on 256 channels: on an A100 at 156 TFLOP/s in place of 19.5, unless cuDNN is told not
    to."""
    rounded, named = (
        seconds(convolution(1), "A100-SXM-80GB", dtype, PLAIN) for dtype in ("float32", "tfloat32")
    )
    plain = seconds(convolution(1), "A100-SXM-80GB", "float32", EXACT)
    assert rounded == named
    assert plain[0] > 3 * rounded[0]


@pytest.mark.parametrize(
    ("device", "rows", "images_per_s"),
    [
        ("V100-SXM2-16GB", 128, 369.66),
        ("A100-SXM-40GB", 360, 756.2),
        ("H100-SXM-80GB", 640, 1898.5),
    ],
)
def test_resnet_50_in_fp32_is_within_the_range_of_what_lambda_published(
    device: str, rows: int, images_per_s: float
) -> None:
    """One process (lambdal/deeplearning-benchmark, resnet50_FP32; of the A100 half of two)."""
    facts = Facts(
        model=network_profile("resnet50-224px", samples=1),
        cluster=resolve_cluster(f"1x{device}"),
        workload=Workload(global_batch_size=rows, precision="fp32"),
    )
    step = estimate(Plan(microbatch_size=rows), facts)
    assert step.step_low_s < rows / images_per_s < step.step_high_s


def test_other_products_in_fp32_stay_exact() -> None:
    flop = 2.0 * 8192 * 4096**2
    product = ProductLoad(ProductKind.LINEAR, 8192, 4096, 4096, 1.0, flop, 2 * flop, 0.0, 0.0)
    device = catalogue.accelerator("A100-SXM-80GB")
    one, other = (
        DeviceRates.of(device, "float32", stack, CALIBRATION).product_s(product, flop, 0.0)
        for stack in (PLAIN, EXACT)
    )
    assert one == other
    assert flop / one < 19.5e12


def test_winograd_speeds_up_3x3_convolutions_without_tensor_cores_only() -> None:
    """36 multiplications become 16; the share `winograd` of that gain is reached."""
    whole = seconds(convolution(5), "V100-SXM2-16GB", "float32")[0] * 9 / 25
    saved = seconds(convolution(3), "V100-SXM2-16GB", "float32")[0]
    assert whole / saved == pytest.approx(CALIBRATION.winograd * 36 / 16, rel=0.02)
    whole = seconds(convolution(5), "A100-SXM-40GB", "tfloat32")[0] * 9 / 25
    assert seconds(convolution(3), "A100-SXM-40GB", "tfloat32")[0] == pytest.approx(whole, rel=0.02)


def test_a_depthwise_convolution_of_large_kernels_takes_what_it_took_on_an_h200() -> None:
    """768 channels of 14 x 14 by 7 x 7, 64 images in bf16: 88 us, and 169 + 76 us backward."""
    draft = ConvnetBuilder(14, channels=768)
    with draft.block("first", draft.image):
        x = draft.convolution(draft.image, 768, 1)
    with draft.block("one", x):
        draft.convolution(x, 768, 7, groups=768)
    forward, backward = seconds(draft, "H200-SXM", "bfloat16")
    assert forward == pytest.approx(88e-6, rel=0.3)
    assert backward == pytest.approx(245e-6, rel=0.3)


def test_a_depthwise_convolution_of_one_position_is_bound_by_memory_bandwidth() -> None:
    """Each map of 256 x 56 x 56 is read once and written once."""
    device = catalogue.accelerator("A100-SXM-40GB")
    moved = SAMPLES * 2 * 256 * 56**2 * 4
    least = moved / (device.memory_bandwidth_bytes_per_s.value * CALIBRATION.memory)
    forward = seconds(convolution(1, groups=256), "A100-SXM-40GB", "tfloat32")[0]
    assert forward == pytest.approx(least, rel=0.02)


def test_feature_maps_are_transposed_unless_channels_come_last() -> None:
    """In 16 bits on an A100: two thirds of input and output of a 1x1 convolution, moved twice."""
    device = catalogue.accelerator("A100-SXM-40GB")
    bandwidth = CALIBRATION.elementwise_bytes_per_s(device, is_eager=True)
    transposed = seconds(convolution(1), "A100-SXM-40GB", "bfloat16", Stack())[0]
    last = seconds(convolution(1), "A100-SXM-40GB", "bfloat16")[0]
    moved = SAMPLES * 2 * 256 * 56**2 * 2
    assert transposed - last == pytest.approx(2 * 2 / 3 * moved / bandwidth, rel=1e-6)
