"""Counts of closed forms against published ones, also without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from profiles.closed_forms.families import profile_from_config
from tests.profiles.closed_forms.family_configs import (
    BERT,
    DEEPSEEK_V3,
    GPT2,
    LLAMA_3_8B,
    T5,
    VIT,
    Config,
    tokens_of,
)

ROOT = Path(__file__).resolve().parents[3]
ENCODER: Config = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}


# Counts as the models' own papers and pages on the Hub have them.
@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA_3_8B, 8_030_261_248),
        (
            {
                **LLAMA_3_8B,
                "hidden_size": 16_384,
                "intermediate_size": 53_248,
                "num_hidden_layers": 126,
                "num_attention_heads": 128,
            },
            405_853_388_800,  # Llama-3.1-405B
        ),
        (
            {
                **LLAMA_3_8B,
                "model_type": "mixtral",
                "architectures": ["MixtralForCausalLM"],
                "vocab_size": 32_000,
                "num_local_experts": 8,
            },
            46_702_792_704,  # Mixtral-8x7B
        ),
        (
            {**GPT2, "vocab_size": 50_257, "n_embd": 768, "n_layer": 12, "n_head": 12}
            | {"n_positions": 1024},
            124_439_808,  # gpt2
        ),
        (
            {**BERT, **ENCODER, "vocab_size": 30_522, "max_position_embeddings": 512},
            109_514_298,  # bert-base-uncased
        ),
        (
            {**T5, "vocab_size": 32_128, "d_model": 512, "d_ff": 2048, "num_layers": 6}
            | {"num_heads": 8, "d_kv": 64},
            60_506_624,  # t5-small
        ),
        (
            {**VIT, **ENCODER, "image_size": 224, "patch_size": 16, "num_labels": 1000},
            86_567_656,  # vit-base-patch16-224
        ),
    ],
)
def test_parameters_are_the_published_count(config: Config, parameters: int) -> None:
    profile = profile_from_config(
        config, samples=1, sequence_length=tokens_of(config), name="published"
    )
    assert profile.parameters == profile.trainable_parameters == parameters


def test_deepseek_v3_has_671_billion_parameters() -> None:
    """As its report says (arXiv:2412.19437, section 4.2), whose sizes these are."""
    config = {
        **DEEPSEEK_V3,
        "vocab_size": 129_280,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }
    profile = profile_from_config(config, samples=1, sequence_length=16, name="deepseek-v3")
    assert round(profile.parameters / 1e9) == 671


def test_flop_are_six_per_parameter_and_token_and_attention() -> None:
    """Kaplan's count: 2 FLOP a weight and token forward, 4 backward; the embedding is looked up."""
    tokens, layers, width = 2048, 32, 4096
    profile = profile_from_config(LLAMA_3_8B, samples=1, sequence_length=tokens, name="llama")
    products = profile.parameters - 128_256 * width - (2 * layers + 1) * width  # no norms
    attention = layers * 2 * tokens * tokens * width  # per pass of one matrix product
    assert profile.flop(1) == 6 * products * tokens + (2 + 5) * attention


def test_closed_forms_run_without_torch() -> None:
    code = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from tests.profiles.closed_forms.family_configs import LLAMA_3_8B
from profiles.closed_forms.families import profile_from_config
from profiles.model.profile import Numerics
print(profile_from_config(
    LLAMA_3_8B, samples=1, sequence_length=128, name="x", numerics=tuple(Numerics)
).parameters)
"""
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.stdout.strip() == "8030261248", run.stderr
