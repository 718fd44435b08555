"""Calls of attention that capture and closed forms note, against configurations and by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from profiles.capture.capture import capture
from profiles.closed_forms.families import profile_from_config
from profiles.model.profile import ModelProfile, Numerics, UnitCost
from profiles.model.work import AttentionCall, AttentionKernel, attention_cost
from profiles.workload.stack import Stack
from profiles.workload.under_stack import under_stack

ROWS, TOKENS, HEADS, KV_HEADS, WIDTH = 3, 24, 4, 2, 16
HIDDEN = HEADS * WIDTH
F32, BF16 = 4, 2
FLASH = Stack(name="flash", attention=AttentionKernel.FLASH2)
NUMERICS = (Numerics.AS_BUILT, Numerics.BF16)


def llama() -> dict[str, Any]:
    return {
        "model_type": "llama", "vocab_size": 100, "hidden_size": HIDDEN, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    }  # fmt: skip


def gpt2(dropout: float = 0.0) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "vocab_size": 100, "n_embd": HIDDEN, "n_layer": 3, "n_head": HEADS,
        "n_positions": 64, "attn_pdrop": dropout,
    }  # fmt: skip


def vit() -> dict[str, Any]:
    return {
        "model_type": "vit", "hidden_size": HIDDEN, "intermediate_size": 96, "image_size": 32,
        "num_hidden_layers": 3, "num_attention_heads": HEADS, "patch_size": 8,
        "architectures": ["ViTForImageClassification"],
    }  # fmt: skip


def captured(config: dict[str, Any]) -> ModelProfile:
    transformers = pytest.importorskip("transformers")
    content = {k: v for k, v in config.items() if k != "architectures"}
    built = transformers.AutoConfig.for_model(content.pop("model_type"), **content)
    if config["model_type"] == "vit":
        model = transformers.ViTForImageClassification(built)
        images = torch.zeros(ROWS, 3, 32, 32)
        batch = {"pixel_values": images, "labels": torch.zeros(ROWS, dtype=torch.long)}
        return capture(model.train(), batch, numerics=NUMERICS)
    built.use_cache = False
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    model = transformers.AutoModelForCausalLM.from_config(built)
    return capture(model.train(), {"input_ids": ids, "labels": ids}, numerics=NUMERICS)


def calls(cost: UnitCost) -> list[AttentionCall]:
    inside = [call for layer in cost.layers for call in layer.after.attention]
    return [*cost.attention, *inside]


PATCHES = (32 // 8) ** 2 + 1  # and the class token
CASES = {
    "llama": (llama(), KV_HEADS, TOKENS, True),
    "gpt2": (gpt2(), HEADS, TOKENS, True),
    "vit": (vit(), HEADS, PATCHES, False),
}


@pytest.mark.parametrize("name", CASES)
def test_every_block_has_the_attention_call_of_its_configuration(name: str) -> None:
    config, kv_heads, length, is_causal = CASES[name]
    for numerics, element_bytes in zip(NUMERICS, (F32, BF16), strict=True):
        results = [calls(block.cost(numerics)) for block in captured(config).blocks()]
        expected = AttentionCall(
            heads=HEADS, kv_heads=kv_heads, queries=length, keys=length, width=WIDTH,
            value_width=WIDTH, is_causal=is_causal, element_bytes=element_bytes,
            kernel=AttentionKernel.CPU,
        )  # fmt: skip
        assert results == [[expected]] * 3


@pytest.mark.parametrize("name", CASES)
def test_the_closed_form_of_a_config_notes_the_same(name: str) -> None:
    config = CASES[name][0]
    length = None if name == "vit" else TOKENS
    profile = profile_from_config(config, samples=ROWS, sequence_length=length, name=name)
    expected = captured(config)
    for ours, theirs in zip(profile.units, expected.units, strict=True):
        assert calls(ours.cost(Numerics.AS_BUILT)) == calls(theirs.cost(Numerics.AS_BUILT))


def test_flash_takes_the_causal_half_of_the_square_that_was_counted() -> None:
    model = captured(llama())
    square = 4 * HEADS * TOKENS * TOKENS * WIDTH  # two products of 2 FLOP a pair and element
    for before, after in zip(model.blocks(), under_stack(model, FLASH).blocks(), strict=True):
        for numerics in NUMERICS:
            was, now = before.cost(numerics), after.cost(numerics)
            assert was.forward_flop.at(1) - now.forward_flop.at(1) == square / 2
            # Five products of the backward for two (arXiv:2205.14135, section 3.1).
            assert was.backward_flop.at(1) - now.backward_flop.at(1) == 2.5 * square / 2
            assert now.activation_bytes == was.activation_bytes
            assert [call.kernel for call in calls(now)] == [AttentionKernel.FLASH2]


def test_a_mask_that_hides_nothing_leaves_the_whole_square() -> None:
    model = captured(vit())
    pairs = zip(model.blocks(), under_stack(model, FLASH).blocks(), strict=True)
    for before, after in pairs:
        assert before.flop(1) == after.flop(1)


def test_unfused_kernels_save_the_attention_scores() -> None:
    """a s^2 b elements (arXiv:2205.05198, equation 2), in place of one sum a query."""
    model = captured(llama())
    eager = Stack(name="eager", attention=AttentionKernel.FUSED_SOFTMAX)
    block, under = (
        next(m.blocks()).cost(Numerics.BF16) for m in (model, under_stack(model, eager))
    )
    scores = HEADS * TOKENS * (BF16 * TOKENS - F32)
    assert under.activation_bytes.at(1) - block.activation_bytes.at(1) == scores


class Bare(nn.Module):
    """Attention and nothing else."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.dropout = dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout, enable_gqa=True
        )


class Around(nn.Module):
    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.attention = Bare(dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        few = x[:, :KV_HEADS]
        out: Tensor = self.attention(x * self.weight, few * self.weight, few * self.weight)
        return out * self.weight  # so that its gradient is a tensor in memory


def bare(*, dropout: float = 0.0) -> UnitCost:
    model = Around(dropout=dropout).train()
    profile = capture(model, (torch.randn(ROWS, HEADS, TOKENS, WIDTH),), name="bare")
    (unit,) = [unit for unit in profile.units if unit.name == "attention"]
    return unit.cost(Numerics.AS_BUILT)


def test_totals_hold_exactly_what_the_call_costs() -> None:
    """So that another kernel's cost can take its place."""
    cost = bare()
    (call,) = cost.attention
    expected = attention_cost(call, call.kernel)
    for name in ("forward_flop", "backward_flop", "forward_moved_bytes", "backward_moved_bytes"):
        assert getattr(cost, name).per_sample == getattr(expected, name), name
        assert getattr(cost, name).fixed == 0
    assert (cost.forward_kernels, cost.backward_kernels) == (1, 1)
    # Queries, keys, values, the output, and a sum for each query.
    operands = F32 * 2 * (HEADS + KV_HEADS) * TOKENS * WIDTH
    assert cost.activation_bytes.at(1) == operands + expected.core_bytes


def test_dropout_is_written_out_and_no_call() -> None:
    assert bare(dropout=0.1).attention == ()


def config_calls(config: dict[str, Any], *, on_processor: bool) -> list[AttentionCall]:
    model = profile_from_config(
        config, samples=ROWS, sequence_length=TOKENS, name="a", on_processor=on_processor
    )
    (actual, *others) = [calls(block.cost(Numerics.AS_BUILT)) for block in model.blocks()]
    assert all(other == actual for other in others)
    return actual


def test_accelerators_take_dropout_in_the_kernel() -> None:
    """The fp32 scores that processors write out and save are one call elsewhere."""
    assert config_calls(gpt2(dropout=0.1), on_processor=True) == []
    (call,) = config_calls(gpt2(dropout=0.1), on_processor=False)
    (plain,) = config_calls(gpt2(), on_processor=True)
    assert call == plain.model_copy(update={"dropout": True})
    assert config_calls(gpt2(), on_processor=False) == [plain]
    written, fused, without = (
        profile_from_config(
            gpt2(dropout), samples=1, sequence_length=TOKENS, name="a", on_processor=on_processor
        )
        for dropout, on_processor in ((0.1, True), (0.1, False), (0.0, False))
    )
    for one, other, best in zip(written.blocks(), fused.blocks(), without.blocks(), strict=True):
        cost, ours, least = (unit.cost(Numerics.AS_BUILT) for unit in (one, other, best))
        assert ours == least.model_copy(update={"attention": ours.attention, "layers": ours.layers})
        scores = F32 * HEADS * TOKENS**2
        assert cost.activation_bytes.at(1) - ours.activation_bytes.at(1) > 2 * scores


def test_accelerators_take_values_of_another_width() -> None:
    config = {
        "model_type": "deepseek_v3", "vocab_size": 100, "hidden_size": HIDDEN,
        "num_hidden_layers": 2, "intermediate_size": 96, "moe_intermediate_size": 32,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": 24,
        "kv_lora_rank": 32, "v_head_dim": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1,
    }  # fmt: skip
    assert config_calls(config, on_processor=True) == []
    (call,) = config_calls(config, on_processor=False)
    assert (call.width, call.value_width) == (16 + 8, 16)
    model = profile_from_config(
        config, samples=1, sequence_length=TOKENS, name="a", on_processor=False
    )
    square = 2 * HEADS * TOKENS**2 * (call.width + call.value_width)
    for before, after in zip(model.blocks(), under_stack(model, FLASH).blocks(), strict=True):
        was, now = before.cost(Numerics.AS_BUILT), after.cost(Numerics.AS_BUILT)
        assert was.forward_flop.at(1) - now.forward_flop.at(1) == square / 2
