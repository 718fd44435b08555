"""Plans that the command saves run in the engine: for the bundled models and for configs."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from advisor.cli.main import cli
from advisor.cost import estimate
from advisor.decide.decision import Decision
from advisor.inputs.bundled.gpt_shapes import SHAPES
from engines.plan import load_plan
from engines.tensor.rules import proposed_styles
from tests.advisor.decide.saved import FIXED_HEADS, TOKENS, cut_down, worst_difference
from tests.nightly import nightly
from tests.workers import Pool

TINY = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**TINY, "num_key_value_heads": 2}
CONFIGS = {
    "BartForConditionalGeneration": {
        **{name: TINY[name] for name in TINY if name.endswith("id") or "position" in name},
        "vocab_size": 128, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64, "decoder_start_token_id": 2, "forced_eos_token_id": 2,
    },
    "BertForMaskedLM": TINY,
    "FalconForCausalLM": {name: TINY[name] for name in TINY if name != "intermediate_size"},
    "Gemma2ForCausalLM": {**GROUPED, "head_dim": 8},
    "GPT2LMHeadModel": {
        "vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "GPTNeoXForCausalLM": TINY,
    "LlamaForCausalLM": GROUPED,
    "MixtralForCausalLM": {**GROUPED, "num_local_experts": 4},
    "OPTForCausalLM": {
        **{name: TINY[name] for name in TINY if name != "intermediate_size"},
        "ffn_dim": 64, "word_embed_proj_dim": 32,
    },
    "Phi3ForCausalLM": GROUPED,
    "Qwen3ForCausalLM": {**GROUPED, "head_dim": 8},
    "T5ForConditionalGeneration": {
        "vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
    },
}  # fmt: skip


def saved_by_the_command(model: str, folder: Path) -> Path:
    """`advise MODEL --plan tp=2 -o plan.json` for two devices."""
    path = folder / "plan.json"
    settings = ["--cluster", "2xH100-SXM-80GB", "--precision", "fp32", "--plan", "tp=2"]
    if ":" not in model:  # a factory brings its own sample
        settings += ["--seq", str(TOKENS)]
    done = CliRunner().invoke(cli, ["plan", model, *settings, "-o", str(path)])
    assert done.exit_code == 0, done.output
    return path


def check(model: str, folder: Path, pool: Pool) -> None:
    saved = saved_by_the_command(model, folder)
    assert {"column", "row"} <= {
        style.partition("/")[0] for _, style in load_plan(saved).tensor_styles
    }
    for error, worst, share in pool.run(
        worst_difference, model, saved, world_size=2, timeout_s=120.0
    ):
        assert error < 1e-5, worst
        assert share < 0.9  # experts stay whole


@pytest.mark.parametrize("name", [*[*SHAPES][:1], *nightly(*[*SHAPES][1:])])
def test_bundled_models_are_trained_as_planned(
    name: str, tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, name, cut_down(name))
    check(name, tmp_path, pool)


NAMES = sorted(CONFIGS)


@pytest.mark.parametrize("architecture", [*NAMES[::3], *nightly(*NAMES[1::3], *NAMES[2::3])])
def test_configs_are_trained_as_planned(architecture: str, tmp_path: Path, pool: Pool) -> None:
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, architecture)
    config = kind.config_class(**CONFIGS[architecture], architectures=[architecture])
    path = tmp_path / "config.json"
    path.write_text(config.to_json_string(use_diff=False))
    check(str(path), tmp_path, pool)


def test_a_model_with_fixed_heads_is_planned_and_trained_with_gathered_outputs(
    tmp_path: Path, pool: Pool
) -> None:
    check(FIXED_HEADS, tmp_path, pool)
    decision = Decision.load(tmp_path / "plan.json")
    attention = "blocks.*.attention"
    styles = dict(decision.plan.tensor_styles)
    assert (styles[f"{attention}.qkv"], styles[f"{attention}.out"]) == ("gather", "gather")
    by_rules = proposed_styles(decision.facts.model, 2)
    assert dict(by_rules)[f"{attention}.qkv"] == "column/3"  # its profile does not show it
    cheaper = estimate(decision.plan.model_copy(update={"tensor_styles": by_rules}), decision.facts)
    assert decision.estimate.step_s > cheaper.step_s
    assert decision.estimate.peak_bytes > cheaper.peak_bytes
    assert any(item.purpose == "gathered outputs" for item in decision.estimate.traffic)
