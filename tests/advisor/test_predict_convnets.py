"""Rows of convolutional networks: time and memory against hand computation and published runs."""

from __future__ import annotations

from dataclasses import replace
from math import exp
from statistics import median, quantiles

import pytest

from advisor.predict.convnet_constants import FITTED
from advisor.predict.convnet_memory import convnet_memory, filled
from advisor.predict.convnet_step import convnet_step, cut
from advisor.predict.convnet_time import block_time, numbers_of
from advisor.predict.ranges import time_range
from advisor.predict.resolve import resolve
from advisor.predict.rows import Row
from advisor.predict.setup import Refusal, Setup
from profiles import catalogue
from profiles.convnets.draft import Draft
from tests.scorecard.fit_convnets import timed_runs
from tests.scorecard.published import FOLDER, published

GIB = 2**30


def setup(**cells: object) -> Setup:
    given: dict[str, object] = {
        "row_id": "row",
        "source": "pytorch",
        "source_date": "2022-06",
        "model_name": "resnet50-224px",
        "arch": "resnet",
        "gpu_type": "V100-SXM2-16GB",
        "gpus_per_node": 8,
        "n_gpus": 1,
        "intra_link": "NVLink2",
        "dtype": "fp32",
        "microbatch": 64,
        "recompute": "none",
    }
    found = resolve(Row(**{**given, **cells}))  # type: ignore[arg-type]
    assert isinstance(found, Setup)
    return found


def seconds(**cells: object) -> float:
    return convnet_step(setup(**cells)).step_s


def test_a_large_convolution_takes_its_flop_over_the_share_of_the_peak() -> None:
    """256 channels of 3x3 on 56 x 56: 2 * 56^2 * 256 * 2304 FLOP an image, three times."""
    draft = Draft(56, channels=256)
    x = draft.image
    with draft.block("stem", x):
        x = draft.convolution(x, 256, 3)
    with draft.block("one", x):
        draft.convolution(x, 256, 3)
    device = catalogue.accelerator("V100-SXM2-16GB")
    numbers = numbers_of(device, "float32", fused=False, year=2022.0)
    time = block_time(draft.blocks[1], 64, numbers, FITTED)
    flop = 64 * 2 * 56**2 * 256 * 9 * 256
    assert time.forward_s == pytest.approx(flop / (15.7e12 * FITTED.vector_share), rel=1e-6)
    assert time.backward_s == pytest.approx(2 * time.forward_s)


def test_the_images_need_no_gradient() -> None:
    draft = Draft(224)
    with draft.block("stem", draft.image):
        draft.convolution(draft.image, 64, 7, stride=2)
    device = catalogue.accelerator("V100-SXM2-16GB")
    numbers = numbers_of(device, "float32", fused=False, year=2022.0)
    time = block_time(draft.blocks[0], 64, numbers, FITTED)
    assert time.backward_s == pytest.approx(time.forward_s)


def test_thin_groups_leave_tiles_idle() -> None:
    """ResNeXt-50 multiplies 3 % more than ResNet-50; published, it takes 49 % longer on a V100."""
    slower = seconds(model_name="resnext50_32x4d", microbatch=32) / seconds(microbatch=32)
    assert slower == pytest.approx(145 / 97, rel=0.2)


def test_cards_with_slow_half_precision_compute_in_single() -> None:
    """A GTX 1080 Ti multiplies fp16 at a 64th; published, a step takes a seventh less in fp16."""
    half = seconds(gpu_type="GTX-1080Ti-11GB", dtype="fp16", microbatch=100)
    single = seconds(gpu_type="GTX-1080Ti-11GB", dtype="fp32", microbatch=100)
    assert 0.6 * single < half < single


def test_programs_that_join_kernels_are_faster() -> None:
    plain = setup(gpu_type="RTX-3090-24GB", dtype="fp16")
    fused = replace(plain, software=replace(plain.software, fused=True))
    assert convnet_step(fused).step_s < 0.8 * convnet_step(plain).step_s


def test_gradients_that_wait_for_the_backward_cost_all_that_they_take() -> None:
    behind = setup(n_gpus=8)
    after = replace(behind, software=replace(behind.software, overlap_reduce=False))
    hidden, exposed = convnet_step(behind), convnet_step(after)
    assert exposed.data_s >= exposed.sent_s == hidden.sent_s > hidden.data_s


def test_cards_without_peer_to_peer_share_the_way_to_main_memory() -> None:
    """VGG-16's 553 MB of gradients; the rate that each of eight gets is an eighth."""
    cells = {"model_name": "vgg16", "gpu_type": "RTX-3090-24GB", "dtype": "fp32",
             "intra_link": "PCIe4", "source": "tf-cnn"}  # fmt: skip
    two, eight = (convnet_step(setup(n_gpus=n, **cells)).sent_s for n in (2, 8))
    # Twice (n - 1) / n of the payload each, over a link that n share.
    assert eight / two == pytest.approx((7 / 8 * 8) / (1 / 2 * 2), rel=0.05)


def test_recompute_repeats_every_forward_but_the_last_one() -> None:
    cells = {"n_gpus": 2, "pp": 2, "pp_schedule": "gpipe", "global_batch": 256}
    plain = convnet_step(setup(**cells))
    again = convnet_step(setup(**cells, recompute="full"))
    assert plain.recompute_s == 0
    # Three of four forwards; a forward is about a third of forward and backward.
    assert 0.2 < again.recompute_s / plain.compute_s < 0.3


def test_stages_are_cut_where_the_slowest_is_fastest() -> None:
    assert cut([1.0, 1.0, 1.0, 9.0, 1.0, 1.0], 3) == [0, 3, 4, 6]
    assert cut([5.0, 1.0], 1) == [0, 2]


def test_input_is_a_limit_of_a_node() -> None:
    """More images than the processors of a node decode: the step waits for them."""
    found = setup(gpu_type="H100-SXM-80GB", dtype="fp16", n_gpus=8, microbatch=256, source="tf-cnn")
    step = convnet_step(found)
    assert step.step_s >= 8 * 256 / 25e3 * (1 - 1e-9)


def test_kept_maps_are_most_of_the_memory() -> None:
    """ResNet-50 keeps 20.9e6 elements an image; weights and gradients are 8 bytes a parameter."""
    memory = convnet_memory(setup(microbatch=100))
    least = 100 * 4 * 20.925e6 + 8 * 25.6e6
    assert least < memory.allocated_bytes < 1.06 * least
    assert memory.fits


def test_what_does_not_fit_is_told() -> None:
    assert not convnet_memory(setup(microbatch=256)).fits
    assert convnet_memory(setup(microbatch=256, dtype="fp16")).fits


def test_a_blank_batch_is_as_many_images_as_fit() -> None:
    found = setup(microbatch=None)
    one_more = replace(found, layout=replace(found.layout, microbatch=found.layout.microbatch + 1))
    room = 0.9 * found.cluster.device.memory_bytes.value - FITTED.context_bytes
    taken = [convnet_memory(each).allocated_bytes for each in (found, one_more)]
    assert taken[0] <= room < taken[1]
    assert filled(found) == found
    assert any("as many as fit" in note for note in found.assumed)


def test_gpipe_keeps_a_stage_input_for_each_microbatch() -> None:
    cells = {"n_gpus": 2, "pp": 2, "pp_schedule": "gpipe", "microbatch": 8, "recompute": "full"}
    four, eight = (
        convnet_memory(setup(global_batch=8 * count, **cells)).allocated_bytes for count in (4, 8)
    )
    # The first stage keeps images: 4 bytes x 3 x 224 x 224; the second what is handed over.
    assert 0 < eight - four < 4 * 8 * 4 * 256 * 56**2


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"n_gpus": 32, "pp": 32}, "18 blocks of resnet50 cannot be cut into pp=32"),
        ({"n_gpus": 2, "tp": 2}, "networks on images are not split so"),
        ({"seq_len": 8, "model_name": "vgg16"}, "images of 8 pixels"),
    ],
)
def test_what_no_program_can_run_is_refused_with_the_rule(
    cells: dict[str, object], reason: str
) -> None:
    given: dict[str, object] = {
        "row_id": "row",
        "model_name": "resnet50",
        "arch": "resnet",
        "gpu_type": "V100-SXM2-16GB",
        "n_gpus": 1,
        "microbatch": 1,
    }
    found = resolve(Row(**{**given, **cells}))  # type: ignore[arg-type]
    assert isinstance(found, Refusal)
    assert reason in found.reason


@pytest.mark.parametrize(("size", "tokens_per_s"), [("base", 18493.6), ("large", 6071.6)])
def test_transformer_xl_goes_through_the_same_roofline(size: str, tokens_per_s: float) -> None:
    """V100, fp16, end of 2022: lambdal/deeplearning-benchmark; no constant was fitted for it."""
    batch, length = {"base": (12, 192), "large": (4, 256)}[size]
    found = setup(
        model_name=f"transformer-xl-{size}",
        arch="transformer_xl",
        seq_len=length,
        dtype="fp16",
        microbatch=batch,
    )
    span = time_range(found, convnet_step(found).step_s)
    assert span.low < batch * length / tokens_per_s < span.high


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no published runs at {FOLDER}")
def test_published_runs_are_met() -> None:
    """Rows of reliability high and medium together; the marks of the scorecard."""
    errors = [abs(exp(timed.error(FITTED)) - 1) for timed in timed_runs(published())]
    assert median(errors) < 0.08
    assert quantiles(errors, n=10)[-1] < 0.25
