"""Kernels of accelerators beside the bytes that they move: charges by operands."""

from __future__ import annotations

from math import prod

import pytest

from profiles.model.kernel_cycles import (
    CAST,
    COPY,
    POINTWISE,
    STRIDED,
    SUM,
    Operand,
    charge,
    convolution,
)

# us on an H200 in steps of models (torch 2.11's profiler), and what the device moves and issues.
BANDWIDTH, CYCLES_PER_S = 4.29e12, 132 * 1.98e9


def rows(*shape: int, dtype: str = "float32", strides: tuple[int, ...] = ()) -> Operand:
    dense = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return Operand(shape, strides or dense, dtype)


def half(*shape: int, strides: tuple[int, ...] = ()) -> Operand:
    return rows(*shape, dtype="bfloat16", strides=strides)


HIDDEN, SCORES = (8, 2048, 2560), (16, 16, 512, 512)
HEADS = (4, 16, 2048, 128)
BY_POSITION = (16 * 2048 * 128, 128, 16 * 128, 1)
MEASURED = {
    "a sum of two dtypes": (POINTWISE, [rows(*HIDDEN), half(*HIDDEN)], rows(*HIDDEN), 157.9),
    "a sum of one": (POINTWISE, [rows(*HIDDEN), rows(*HIDDEN)], rows(*HIDDEN), 118.0),
    "a cast to 32 bits": (COPY, [half(*HIDDEN)], rows(*HIDDEN), 129.8),
    "a cast to 16 bits": (COPY, [rows(*HIDDEN)], half(*HIDDEN), 59.5),
    "a product with a row": (
        POINTWISE, [rows(16, 512, 1024), rows(1024)], rows(16, 512, 1024), 27.3
    ),
    "a product with a column": (
        POINTWISE, [rows(16, 512, 1024), rows(16, 512, 1)], rows(16, 512, 1024), 27.1
    ),
    "rotary tables": (POINTWISE, [rows(*HEADS), rows(1, 1, 2048, 128)], rows(*HEADS), 57.2),
    "heads turned": (COPY, [half(16, 512, 16, 64, strides=(524288, 64, 32768, 1))],
        half(16, 512, 16, 64), 25.1),
    "scores and a bias of another dtype": (
        POINTWISE, [rows(*SCORES), half(1, *SCORES[1:])], rows(*SCORES), 304.1
    ),
    "GELU": ("gelu", [half(8, 2048, 10240)], half(8, 2048, 10240), 236.2),
    "dropout": ("native_dropout", [rows(*SCORES)], rows(*SCORES), 185.1),
    "halves side by side": (
        "cat", [rows(*HEADS[:3], 64), rows(*HEADS[:3], 64)], rows(*HEADS), 71.7
    ),
    "a bias's gradient": (SUM, [half(12608, 1024)], half(1, 1024), 27.9),
    "a wide bias's gradient": (SUM, [half(16384, 10240)], half(1, 10240), 92.1),
    "a layer norm": ("native_layer_norm", [rows(*HIDDEN)], rows(*HIDDEN), 111.9),
    "a layer norm of narrow rows": (
        "native_layer_norm", [rows(64, 784, 256)], rows(64, 784, 256), 89.5
    ),
    "log softmax of a vocabulary": (
        "_log_softmax", [rows(16384, 50304)], rows(16384, 50304), 3087.0
    ),
    "gradients of queries, keys and values put together": (
        "stack", [half(8, 32, 2048, 80)] * 3, half(3, 8, 32, 2048, 80), 551.1
    ),
    "picked scores": (
        "gather", [half(128, 512, 512), rows(128, 512, 512, dtype="int64")],
        half(128, 512, 512), 114.9,
    ),
    "and their gradient": (
        "scatter_add", [half(128, 512, 512), rows(128, 512, 512, dtype="int64"),
        half(128, 512, 512)], half(128, 512, 512), 353.6,
    ),
    "a roll": ("roll", [half(64, 14, 14, 512)], half(64, 14, 14, 512), 27.5),
    "a group norm": (
        "native_group_norm", [rows(16, 64, 256, 256)], rows(16, 64, 256, 256), 640.0
    ),
    "softmax of scores": ("_softmax", [rows(*SCORES)], rows(*SCORES), 136.9),
}  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
def test_a_kernel_takes_what_it_took_in_a_step(name: str) -> None:
    kernel, inputs, out, microseconds = MEASURED[name]
    size = {"float32": 4, "bfloat16": 2, "int64": 8}
    moved = sum(prod(each.shape) * size[each.dtype] for each in (*inputs, out))
    moved += out.elements if kernel == "native_dropout" else 0  # the mask
    charged = charge(kernel, inputs, [out])
    seconds = moved / BANDWIDTH + charged.cycles / CYCLES_PER_S
    assert seconds * 1e6 == pytest.approx(microseconds, rel=0.2)


def test_pooling_takes_what_it_took_in_a_step_of_a_resnet() -> None:
    """0.83 ms forward and 2.26 backward; positions are kept in 64 bits."""
    maps, pooled = half(256, 64, 112, 112), half(256, 64, 56, 56)
    positions = rows(256, 64, 56, 56, dtype="int64")
    moved = 2 * maps.elements + (2 + 8) * pooled.elements
    for name, outputs, milliseconds in (
        ("max_pool2d_with_indices", [pooled, positions], 0.83),
        ("max_pool2d_with_indices_backward", [maps], 2.26),
    ):
        cycles = charge(name, [maps], outputs).cycles
        seconds = moved / BANDWIDTH + cycles / CYCLES_PER_S
        assert seconds == pytest.approx(milliseconds * 1e-3, rel=0.15)


def test_products_of_a_softmax_s_backward_are_of_its_dtype() -> None:
    scores = half(2, 32, 2048, 2048)
    moved = charge("_softmax_backward_data", [scores, scores], [scores]).moved_bytes
    assert moved == 3 * 2 * scores.elements


def test_the_backward_of_a_softmax_is_two_kernels() -> None:
    """739 us of 67 million scores in the one and 730 in the other, on an H200: 12 bytes each."""
    scores = rows(2, 32, 2048, 2048)
    charged = charge("_softmax_backward_data", [scores, scores], [scores])
    assert charged.kernels == 2
    seconds = (charged.moved_bytes + 12 * scores.elements) / BANDWIDTH
    assert seconds == pytest.approx((739.0 + 730.3) * 1e-6, rel=0.05)


def test_a_softmax_that_is_safe_is_four_kernels() -> None:
    """Of 268 million scores: softmax 674 us, a comparison 306, along rows 158, a choice 828."""
    scores = rows(2, 32, 2048, 2048)
    charged = charge("_safe_softmax", [scores], [scores])
    assert charged.kernels == 4
    seconds = (charged.moved_bytes + 8 * scores.elements) / BANDWIDTH
    seconds += charged.cycles / CYCLES_PER_S
    assert seconds == pytest.approx((673.6 + 306.1 + 157.7 + 827.5) * 1e-6, rel=0.1)


def test_a_softmax_over_classes_before_positions_waits_for_every_class() -> None:
    """Logits (32, 32000, 256) of an LSTM took 37.9 ms, and 17.6 in the backward, on an H200."""
    logits = rows(32, 32_000, 256)
    for name, milliseconds, tensors in (
        ("_log_softmax", 37.87, 2),
        ("_log_softmax_backward_data", 17.61, 3),
    ):
        cycles = charge(name, [logits], [logits], dim=1).cycles
        seconds = cycles / CYCLES_PER_S
        assert seconds == pytest.approx(milliseconds * 1e-3, rel=0.05)
        assert charge(name, [logits], [logits], dim=-1).cycles < 0.1 * cycles
        assert 4 * tensors * logits.elements / BANDWIDTH < 0.1 * seconds
        # A step with a quarter of the rows has fewer threads, and no fewer classes.
        fewer = rows(8, 32_000, 256)
        assert charge(name, [fewer], [fewer], dim=1).cycles == cycles


def test_maps_are_laid_out_anew_as_fast_as_they_were_in_a_step() -> None:
    """Of 67 million elements in 16 bits 91 us one way and 125 back, on an H200."""
    moved = 2 * 2 * 16 * 64 * 256 * 256
    charged = convolution(moved // 2, is_half=True)
    # A search for the algorithm, and room for both maps once.
    assert (charged.kernels, charged.turned_bytes) == (1, moved)
    assert charged.turned_cycles == charged.cycles
    assert charged.workspace_bytes == moved // 2
    seconds = moved / BANDWIDTH + charged.cycles / CYCLES_PER_S
    assert 2 * seconds == pytest.approx((91.1 + 125.3) * 1e-6, rel=0.1)


def test_operands_that_lie_alike_load_vectors_in_whatever_order() -> None:
    turned = rows(*HEADS, strides=BY_POSITION)
    assert charge(POINTWISE, [turned, turned], [turned]).cycles == 0
    assert charge(POINTWISE, [turned, rows(*HEADS)], [turned]).cycles == round(
        STRIDED * turned.elements
    )
    part = rows(4, 16, 2048, 64, strides=(4194304, 262144, 128, 1))  # of the last dimension
    assert charge(POINTWISE, [part], [part]).cycles == round(STRIDED * part.elements)


def test_masks_and_numbers_are_no_casts() -> None:
    mask, number = rows(*HIDDEN, dtype="bool"), rows()
    assert charge(POINTWISE, [rows(*HIDDEN), mask, number], [rows(*HIDDEN)]).cycles == 0
    of_mask = charge(COPY, [mask], [rows(*HIDDEN)]).cycles
    assert of_mask == round(CAST * mask.elements)
    assert charge(POINTWISE, [rows(*HIDDEN)], [mask]).cycles == 0  # integers are few
