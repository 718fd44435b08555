"""LoRA as a change of a profile: sizes, FLOP and states by hand."""

from __future__ import annotations

import pytest

from profiles.closed_forms.transformer import TransformerShape, transformer_profile
from profiles.model.profile import Numerics
from profiles.workload.lora import NF4_BYTES, takes_lora, with_lora
from profiles.workload.optimizers import optimizer_profile, upkeep
from tests.factories import transformer

H, FFN, VOCAB, TOKENS, LAYERS, RANK = 64, 256, 1000, 128, 3, 8
SHAPE = TransformerShape(
    kind="llama", layers=LAYERS, hidden=H, heads=4, kv_heads=4, ffn=FFN, vocab=VOCAB,
    length=TOKENS, gated=True, tied=False, head_width=16,
)  # fmt: skip
MODEL = transformer_profile(SHAPE, name="llama")
# Fused query, key and value; output; gate and up in one; down: (inputs, outputs).
LINEARS = [(H, 3 * H), (H, H), (H, 2 * FFN), (FFN, H)]
WEIGHTS = sum(i * o for i, o in LINEARS)
ADAPTERS = sum(RANK * (i + o) for i, o in LINEARS)


def block(model=MODEL):
    return next(model.blocks())


def test_only_adapters_learn() -> None:
    model = with_lora(MODEL, rank=RANK)
    assert model.trainable_parameters == LAYERS * ADAPTERS
    # Adapters in fp32, everything else as it was, in 2 bytes in place of 4.
    assert model.gradient_bytes == 4 * LAYERS * ADAPTERS
    assert model.parameter_bytes == MODEL.parameter_bytes // 2 + 4 * LAYERS * ADAPTERS
    assert model.dtype == "bfloat16"
    assert model.numerics == (Numerics.AS_BUILT,)


def test_adamw_keeps_two_fp32_moments_of_adapters_alone() -> None:
    states = upkeep(optimizer_profile("adamw"), with_lora(MODEL, rank=RANK).units)
    assert states.state_bytes == 8 * LAYERS * ADAPTERS
    # By blocks of elements too: their shapes are known.
    assert upkeep(optimizer_profile("adamw-8bit"), with_lora(MODEL).units).state_bytes > 0


def test_a_frozen_layer_has_one_product_in_backward() -> None:
    before = block().cost(Numerics.BF16)
    after = block(with_lora(MODEL, rank=RANK)).cost(Numerics.AS_BUILT)
    products, adapters = 2 * TOKENS * WEIGHTS, 2 * TOKENS * ADAPTERS
    assert after.forward_flop.at(1) == before.forward_flop.at(1) + adapters
    # Of two products back one is left, and two of each adapter's.
    assert after.backward_flop.at(1) == before.backward_flop.at(1) - products + 2 * adapters
    # Layers keep what they take for their adapters, which keep RANK features more.
    narrow = 2 * TOKENS * RANK * len(LINEARS)
    assert after.activation_bytes.at(1) == before.activation_bytes.at(1) + narrow


def test_head_and_embedding_learn_nothing() -> None:
    model = with_lora(MODEL, rank=RANK)
    embedding, head = model.units[0], model.units[-2]
    assert head.trainable_parameters == embedding.trainable_parameters == 0
    was = MODEL.units[-2].cost(Numerics.BF16).backward_flop.at(1)
    assert head.cost(Numerics.AS_BUILT).backward_flop.at(1) == was / 2
    assert head.parameter_bytes == 2 * (H * VOCAB + H)  # with its norm


def test_a_base_in_four_bits() -> None:
    model = with_lora(MODEL, rank=RANK, is_quantised=True)
    norms = 2 * H
    assert pytest.approx(0.516, abs=1e-3) == NF4_BYTES  # arXiv:2305.14314
    whole = WEIGHTS * NF4_BYTES + 2 * norms + 4 * ADAPTERS
    assert block(model).parameter_bytes == pytest.approx(whole, abs=2)
    # The largest layer lives in bf16 while it multiplies.
    lora = block(with_lora(MODEL, rank=RANK)).cost(Numerics.AS_BUILT)
    cost = block(model).cost(Numerics.AS_BUILT)
    unpacked = cost.forward_transient_bytes.at(1) - lora.forward_transient_bytes.at(1)
    assert unpacked == 2 * H * 2 * FFN


def test_lora_needs_known_layers_in_bf16() -> None:
    assert takes_lora(MODEL)
    assert takes_lora(with_lora(MODEL))
    assert not takes_lora(transformer())  # its layers are not known
    fp32 = transformer_profile(SHAPE, name="llama", numerics=(Numerics.AS_BUILT,))
    assert not takes_lora(fp32)
