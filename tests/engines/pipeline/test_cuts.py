"""Bytes that cross each cut: by hand, and as the engine really sends them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engines.pipeline.cuts import Cut, cuts
from engines.plan import Plan
from profiles.capture.capture import capture
from tests.engines.cases import CASES, WIRINGS, profile_of
from tests.engines.parity import parallelize
from tests.workers import Pool


def of_case(name: str, plan: str, *, samples: int) -> tuple[Cut, ...]:
    case = {**CASES, **WIRINGS}[name]
    return cuts(Plan.parse(plan), profile_of(case, case.build()).flow, samples=samples)


def test_a_gpt_sends_its_hidden_state_and_gets_the_gradient_back() -> None:
    cuts = of_case("gpt", "pp=3 schedule=gpipe stages=blocks.1,norm", samples=5)
    hidden = 5 * 12 * 32 * 4  # rows, tokens, width, fp32
    assert [(cut.border, cut.stage) for cut in cuts] == [("blocks.1", 1), ("norm", 2)]
    for cut, unit in zip(cuts, ("blocks.0", "blocks.2"), strict=True):
        (tensor,) = cut.tensors
        assert (tensor.unit, tensor.shape, tensor.dtype) == (unit, (2, 12, 32), "float32")
        assert cut.forward_bytes == cut.backward_bytes == hidden
        assert not tensor.is_passing
    assert str(cuts[0]) == "cut at blocks.1: blocks.0; 7.50 KiB forward, 7.50 KiB backward"


def test_skips_of_a_unet_cross_until_they_are_used() -> None:
    cuts = of_case("unet", "pp=4 schedule=gpipe stages=bottom,up,leave", samples=1)
    high, low, up = 8 * 8 * 8 * 4, 16 * 4 * 4 * 4, 8 * 8 * 8 * 4
    assert [[t.unit for t in cut.tensors] for cut in cuts] == [
        ["enter", "down"],
        ["enter", "down", "bottom"],
        ["enter", "up"],
    ]
    assert [cut.forward_bytes for cut in cuts] == [high + low, high + low + low, high + up]
    assert [[t.is_passing for t in cut.tensors] for cut in cuts] == [
        [False, False],
        [True, True, False],
        [True, False],
    ]


def test_the_encoder_output_of_t5_and_position_biases_cross_a_cut_of_the_decoder() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=31, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    ids = torch.arange(12).reshape(2, 6)
    flow = capture(model, {"input_ids": ids, "labels": ids[:, :4].contiguous()}).flow
    plan = Plan.parse("pp=2 schedule=gpipe stages=decoder.block.1")
    (cut,) = cuts(plan, flow, samples=3)
    by_shape = {t.shape: t for t in cut.tensors}
    table, cross = 2 * 4 * 4 * 4, 2 * 4 * 6 * 4  # position biases, the same for every row
    assert cut.forward_bytes == 3 * (6 + 4) * 16 * 4 + table + cross
    assert cut.backward_bytes == cut.forward_bytes - cross  # zeros, which no parameter made
    assert by_shape[2, 6, 16].forward_bytes == 3 * 6 * 16 * 4  # the encoder's
    assert by_shape[2, 4, 16].forward_bytes == 3 * 4 * 16 * 4  # the decoder's own
    assert by_shape[2, 6, 16].backward_bytes == 3 * 6 * 16 * 4


def test_a_frozen_front_gets_nothing_back() -> None:
    case = CASES["gpt"]
    model = case.build()
    for name in ("embed", "blocks.0"):
        model.get_submodule(name).requires_grad_(False)
    model.get_parameter("position").requires_grad_(False)
    plan = Plan.parse("pp=2 schedule=gpipe stages=blocks.1")
    (cut,) = cuts(plan, profile_of(case, model).flow, samples=1)
    assert (cut.forward_bytes, cut.backward_bytes) == (12 * 32 * 4, 0)


def test_a_plan_without_a_pipeline_has_no_cuts() -> None:
    assert of_case("gpt", "dp_shard=4", samples=1) == ()


def sent(name: str, plan: str) -> tuple[int, list[Cut], str]:
    """Bytes that this rank sends to others in a step of two microbatches of two rows."""
    case, _, parallel = parallelize(name, plan)
    parallel.train_step(case.batch(4))
    total, own = 0, dist.P2POp.__init__

    def counting(self: dist.P2POp, op: object, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        nonlocal total
        total += tensor.nbytes if op is dist.isend else 0
        own(self, op, tensor, *args, **kwargs)

    dist.P2POp.__init__ = counting
    try:
        parallel.train_step(case.batch(4))
    finally:
        dist.P2POp.__init__ = own
    return total, list(parallel.cuts), repr(parallel)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("gpt", "pp=2 schedule=1f1b microbatches=2 stages=blocks.1"),
        ("unet", "pp=2 schedule=gpipe microbatches=2 stages=bottom"),
        ("siamese", "pp=2 schedule=gpipe microbatches=2 stages=middle"),
        ("unet", "pp=2 schedule=interleaved microbatches=2 stages=bottom,up,leave"),
    ],
)
def test_the_engine_sends_what_the_cuts_say(pool: Pool, name: str, plan: str) -> None:
    results = pool.run(sent, name, plan, world_size=2)
    of_this_model = results[0][1]
    assert sum(total for total, _, _ in results) == 2 * sum(
        cut.forward_bytes + cut.backward_bytes for cut in of_this_model
    )
    assert f"cut at {of_this_model[0].border}: " in results[0][2]
