"""Models of the transformers library as they are, against real runs of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from profiles.capture.batch.call import Batch
from profiles.capture.capture import capture
from profiles.model.profile import Numerics
from tests.profiles.capture.measured import measure, missing_formulas

transformers = pytest.importorskip("transformers")

from tests.zoo import (  # noqa: E402 - only where transformers is installed
    PIXELS,
    TOKENS,
    bert,
    gpt2,
    llama,
    mixtral,
    resnet,
    swin,
    t5,
    vit,
)


def test_grouped_experts_cost_what_experts_one_by_one_do() -> None:
    torch.manual_seed(0)
    model = mixtral()
    profile = capture(model, TOKENS)
    model.config._experts_implementation = "eager"
    with FlopCounterMode(display=False, custom_mapping=missing_formulas()) as counter:
        model(**TOKENS).loss.backward()
    assert profile.flop(2) == counter.get_total_flops()


@pytest.mark.parametrize(
    ("build", "batch", "blocks", "shared"),
    [
        (gpt2, TOKENS, 3, {"transformer.wte", "lm_head"}),
        (llama, TOKENS, 3, set()),
        (bert, TOKENS, 3, {"bert.embeddings", "cls"}),
        (t5, TOKENS, 6, {"shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head"}),
        (mixtral, TOKENS, 3, set()),
        (vit, PIXELS, 3, set()),
        (swin, PIXELS, 4, set()),
        (resnet, PIXELS, 8, set()),
    ],
)
def test_a_real_run_takes_the_flop_and_activations_predicted(
    build: Callable[[], nn.Module], batch: Batch, blocks: int, shared: set[str]
) -> None:
    torch.manual_seed(0)
    model = build().train()
    profile = capture(model, batch)
    measured = measure(model, batch)
    rows = profile.samples
    assert profile.has_loss
    assert profile.flop(rows) == measured.flop
    predicted = sum(u.cost(Numerics.AS_BUILT).activation_bytes.at(rows) for u in profile.units)
    assert predicted == measured.saved_bytes
    assert profile.parameters == sum(p.numel() for p in model.parameters())
    assert len(list(profile.blocks())) == blocks
    assert {unit.name for unit in profile.units if unit.is_shared} == shared
